package io.anarchon.client;

import io.anarchon.v1.CatchUpPolicy;
import io.anarchon.v1.CronSchedule;
import io.anarchon.v1.EverySchedule;
import io.anarchon.v1.JobSpec;
import io.anarchon.v1.OverlapPolicy;
import io.anarchon.v1.RetryPolicy;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * A handler with its name, schedule and policies.
 *
 * <pre>{@code
 * Job sync = Job.every("sync", "10s").timeout("1m").run(ctx -> "3 rows");
 * }</pre>
 *
 * <p>The name identifies the job in the store, and must be the same on every instance and in every
 * deploy: 1 to 128 characters of letters, digits and {@code . _ - : /}, starting with a letter or
 * digit. Durations are {@link Duration}s of whole milliseconds, or texts ({@link Durations#parse}).
 * What a builder is not told, the sidecar decides; what the sidecar's store cannot do, the sidecar
 * refuses. Every method throws {@link AnarchonException.WrongJob} for what is wrong.
 */
public final class Job {
  private static final Pattern NAME = Pattern.compile("[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}");
  private static final Pattern ZONE = Pattern.compile("[A-Za-z0-9_+/-]{1,64}");
  private static final Duration MOMENT = Duration.ofMillis(1);
  private static final Duration LONG = Duration.ofDays(366);
  private static final Duration LEASE_MIN = Duration.ofSeconds(3);
  private static final Duration LEASE_MAX = Duration.ofHours(1);
  private static final int HEARTBEATS_A_LEASE = 3;
  private static final int LABELS_MAX = 16;
  private static final int LABEL_MAX_BYTES = 128;

  private final JobSpec spec;
  private final Handler handler;

  private Job(JobSpec spec, Handler handler) {
    this.spec = spec;
    this.handler = handler;
  }

  /** Returns the job's name. */
  public String name() {
    return spec.getName();
  }

  JobSpec spec() {
    return spec;
  }

  /** Returns what runs an attempt of it: for tests, see {@link TestRun}. */
  public Handler handler() {
    return handler;
  }

  /**
   * A job that is due on a grid counted from the Unix epoch in UTC. The period: 100 ms to 366 d.
   */
  public static Builder every(String name, Duration period) {
    Builder builder = new Builder(name);
    Durations.check("period", period, Duration.ofMillis(100), LONG);
    builder.spec.setEvery(EverySchedule.newBuilder().setPeriod(Durations.toWire(period)));
    return builder;
  }

  /** As {@link #every(String, Duration)}, with a text such as "10s" or "1h30m". */
  public static Builder every(String name, String period) {
    return every(name, Durations.parse("period", period));
  }

  /**
   * A job that is due whenever the wall clock of its {@link Builder#timeZone zone}, by default UTC,
   * matches the expression: five fields, or six with seconds first, or an alias such as "@daily".
   */
  public static Builder cron(String name, String expression) {
    Builder builder = new Builder(name);
    CronFields.check(expression);
    builder.spec.setCron(
        CronSchedule.newBuilder().setExpression(expression.strip()).setTimeZone("UTC"));
    return builder;
  }

  /**
   * A job without a schedule: it is never due by itself, and runs when somebody triggers it. The
   * sidecar refuses it where the store has no control, and with it the policies that are for slots:
   * jitter, startDeadline, catchUp and catchUpLimit.
   */
  public static Builder onTrigger(String name) {
    return new Builder(name);
  }

  /**
   * A handler that is offered by its name alone: the sidecar's configuration must have the job.
   * Where policies are given here and there, the configuration wins, and a note says so.
   */
  public static Builder byName(String name) {
    Builder builder = new Builder(name);
    builder.spec.setByName(true);
    return builder;
  }

  private static AnarchonException.WrongJob wrong(String format, Object... values) {
    return new AnarchonException.WrongJob(String.format(format, values));
  }

  /** What a slot does that finds another run of its job unfinished. */
  public enum Overlap {
    /** It is recorded as skipped. The default where the store keeps leases. */
    SKIP,
    /** It starts at once. The default elsewhere. */
    ALLOW,
    /** It starts when the other has ended; of several that wait the newest stays. */
    QUEUE,
    /** As QUEUE, and the other run is asked to stop. */
    CANCEL
  }

  /** Which slots are run that came due while nobody could run them. */
  public enum CatchUp {
    /** None of them. The default where the store keeps no leases. */
    NONE,
    /** The newest of them. The default where the store keeps leases. */
    LATEST,
    /** Every one, oldest first. */
    ALL
  }

  /** Makes a job; {@link #run} ends it. */
  public static final class Builder {
    private final JobSpec.Builder spec = JobSpec.newBuilder();
    private final RetryPolicy.Builder retry = RetryPolicy.newBuilder();
    private Duration retryDelay = Duration.ofSeconds(1);
    private Duration retryMaxDelay = Duration.ofHours(1);
    private String retrySaid = "";

    private Builder(String name) {
      if (name == null || !NAME.matcher(name).matches()) {
        throw wrong(
            "job name \"%s\": must be 1 to 128 characters of letters, digits and . _ - : /, "
                + "starting with a letter or digit",
            name);
      }
      spec.setName(name);
    }

    /** Moves a grid: less than its period. Default: none. */
    public Builder offset(Duration offset) {
      if (!spec.hasEvery()) {
        throw wrong("offset %s: is for every(...)", offset);
      }
      Durations.check("offset", offset);
      EverySchedule.Builder every = spec.getEveryBuilder();
      long periodMs = Durations.toMillis(every.getPeriod());
      if (offset.toMillis() >= periodMs) {
        throw wrong(
            "offset %s: must be less than the period %s",
            Durations.text(offset), Durations.text(Duration.ofMillis(periodMs)));
      }
      every.clearOffset();
      if (!offset.isZero()) {
        every.setOffset(Durations.toWire(offset));
      }
      return this;
    }

    /** As {@link #offset(Duration)}, with a text such as "1h30m". */
    public Builder offset(String text) {
      return offset(Durations.parse("offset", text));
    }

    /** Names the zone of a cron schedule: an IANA name such as "Europe/Athens". Default: "UTC". */
    public Builder timeZone(String name) {
      if (!spec.hasCron()) {
        throw wrong("timeZone \"%s\": is for cron(...)", name);
      }
      if (name == null || !ZONE.matcher(name).matches()) {
        throw wrong(
            "timeZone \"%s\": must be an IANA name such as \"Europe/Athens\" or \"UTC\"", name);
      }
      spec.getCronBuilder().setTimeZone(name);
      return this;
    }

    /**
     * The longest random wait before an instance claims a slot; less than the gap between slots.
     * Default: the smaller of 2 s and a quarter of the gap. Zero: none.
     */
    public Builder jitter(Duration jitter) {
      Durations.check("jitter", jitter, Duration.ZERO, LONG);
      spec.setJitter(Durations.toWire(jitter));
      return this;
    }

    /** As {@link #jitter(Duration)}, with a text such as "1h30m". */
    public Builder jitter(String text) {
      return jitter(Durations.parse("jitter", text));
    }

    /** How long one attempt may take before it is cancelled. Default: no limit. */
    public Builder timeout(Duration timeout) {
      Durations.check("timeout", timeout, MOMENT, LONG);
      spec.setTimeout(Durations.toWire(timeout));
      return this;
    }

    /** As {@link #timeout(Duration)}, with a text such as "1h30m". */
    public Builder timeout(String text) {
      return timeout(Durations.parse("timeout", text));
    }

    /** How often a runner says that it is alive, at most a third of the lease. Default: a sixth. */
    public Builder heartbeat(Duration heartbeat) {
      Durations.check("heartbeat", heartbeat, MOMENT, LEASE_MAX.dividedBy(HEARTBEATS_A_LEASE));
      spec.setHeartbeat(Durations.toWire(heartbeat));
      return this;
    }

    /** As {@link #heartbeat(Duration)}, with a text such as "1h30m". */
    public Builder heartbeat(String text) {
      return heartbeat(Durations.parse("heartbeat", text));
    }

    /** How long a runner is believed after its last heartbeat, 3 s to 1 h. Default: 30 s. */
    public Builder lease(Duration lease) {
      Durations.check("lease", lease, LEASE_MIN, LEASE_MAX);
      spec.setLease(Durations.toWire(lease));
      return this;
    }

    /** As {@link #lease(Duration)}, with a text such as "1h30m". */
    public Builder lease(String text) {
      return lease(Durations.parse("lease", text));
    }

    /** What a slot does that finds another run unfinished. */
    public Builder overlap(Overlap overlap) {
      spec.setOverlap(
          switch (overlap) {
            case SKIP -> OverlapPolicy.OVERLAP_POLICY_SKIP;
            case ALLOW -> OverlapPolicy.OVERLAP_POLICY_ALLOW;
            case QUEUE -> OverlapPolicy.OVERLAP_POLICY_QUEUE;
            case CANCEL -> OverlapPolicy.OVERLAP_POLICY_CANCEL;
          });
      return this;
    }

    /** Which slots are run that came due while nobody could run them. */
    public Builder catchUp(CatchUp catchUp) {
      spec.getCatchUpBuilder()
          .setPolicy(
              switch (catchUp) {
                case NONE -> CatchUpPolicy.CATCH_UP_POLICY_NONE;
                case LATEST -> CatchUpPolicy.CATCH_UP_POLICY_LATEST;
                case ALL -> CatchUpPolicy.CATCH_UP_POLICY_ALL;
              });
      return this;
    }

    /** No slot older than this is caught up, nor a run taken over. Default: 24 h. */
    public Builder catchUpWindow(Duration window) {
      Durations.check("catchUpWindow", window, MOMENT, LONG);
      spec.getCatchUpBuilder().setWindow(Durations.toWire(window));
      return this;
    }

    /** As {@link #catchUpWindow(Duration)}, with a text such as "1h30m". */
    public Builder catchUpWindow(String text) {
      return catchUpWindow(Durations.parse("catchUpWindow", text));
    }

    /** No more slots than this are caught up, 1 to 10,000. Default: 100. */
    public Builder catchUpLimit(int limit) {
      spec.getCatchUpBuilder().setLimit(whole("catchUpLimit", limit, 1, 10_000));
      return this;
    }

    /**
     * A slot that nobody claimed for this long is missed. Default: the gap to the next slot, at
     * most 60 s, at least jitter + 5 s.
     */
    public Builder startDeadline(Duration deadline) {
      Durations.check("startDeadline", deadline, Duration.ofSeconds(1), LONG);
      spec.getCatchUpBuilder().setStartDeadline(Durations.toWire(deadline));
      return this;
    }

    /** As {@link #startDeadline(Duration)}, with a text such as "1h30m". */
    public Builder startDeadline(String text) {
      return startDeadline(Durations.parse("startDeadline", text));
    }

    /**
     * Attempts a run may have because its runners died, froze or were cut off, 1 to 1,000. Default:
     * 3.
     */
    public Builder maxAttempts(int attempts) {
      spec.setMaxAttempts(whole("maxAttempts", attempts, 1, 1_000));
      return this;
    }

    /** Attempts that follow failed ones, 0 to 100. Default: 0, a failure is final. */
    public Builder retries(int retries) {
      retry.setRetries(whole("retries", retries, 0, 100));
      return this;
    }

    /** The pause before the first retry. Each is drawn from 50 % to 100 % of it. Default: 1 s. */
    public Builder retryDelay(Duration delay) {
      Durations.check("retryDelay", delay, MOMENT, LONG);
      retryDelay = delay;
      retrySaid = "retryDelay";
      retry.setDelay(Durations.toWire(delay));
      return this;
    }

    /** As {@link #retryDelay(Duration)}, with a text such as "1h30m". */
    public Builder retryDelay(String text) {
      return retryDelay(Durations.parse("retryDelay", text));
    }

    /** Each pause is this many times the one before, 1 to 100. Default: 2. */
    public Builder retryFactor(double factor) {
      if (!(factor >= 1 && factor <= 100)) {
        throw wrong("retryFactor %s: must be 1 to 100", factor);
      }
      retrySaid = "retryFactor";
      retry.setFactor(factor);
      return this;
    }

    /** No pause is longer than this. Default: 1 h. */
    public Builder retryMaxDelay(Duration delay) {
      Durations.check("retryMaxDelay", delay, MOMENT, LONG);
      retryMaxDelay = delay;
      retrySaid = "retryMaxDelay";
      retry.setMaxDelay(Durations.toWire(delay));
      return this;
    }

    /** As {@link #retryMaxDelay(Duration)}, with a text such as "1h30m". */
    public Builder retryMaxDelay(String text) {
      return retryMaxDelay(Durations.parse("retryMaxDelay", text));
    }

    /**
     * Runs of the job that one instance may execute at once, 1 to 10,000. Default: no limit of its
     * own.
     */
    public Builder concurrency(int concurrency) {
      spec.setConcurrency(whole("concurrency", concurrency, 1, 10_000));
      return this;
    }

    /** Annotations for people and dashboards: at most 16, key and value at most 128 bytes each. */
    public Builder labels(Map<String, String> labels) {
      if (labels.size() > LABELS_MAX) {
        throw wrong("%d labels: must be at most %d", labels.size(), LABELS_MAX);
      }
      labels.forEach(
          (key, value) -> {
            if (bytes(key) > LABEL_MAX_BYTES || bytes(value) > LABEL_MAX_BYTES) {
              throw wrong(
                  "label \"%s\": key and value must be at most %d bytes each",
                  key, LABEL_MAX_BYTES);
            }
          });
      spec.clearLabels().putAllLabels(labels);
      return this;
    }

    /** How long a handler that was asked to stop keeps its lease. Default: 5 s. */
    public Builder cancelGrace(Duration grace) {
      Durations.check("cancelGrace", grace, Duration.ZERO, LEASE_MAX);
      spec.setCancelGrace(Durations.toWire(grace));
      return this;
    }

    /** As {@link #cancelGrace(Duration)}, with a text such as "1h30m". */
    public Builder cancelGrace(String text) {
      return cancelGrace(Durations.parse("cancelGrace", text));
    }

    /**
     * How long a running handler may go on when its instance stops. Default, and at most: the
     * instance's own grace, 20 s.
     */
    public Builder stopGrace(Duration grace) {
      Durations.check("stopGrace", grace, Duration.ZERO, LONG);
      spec.setStopGrace(Durations.toWire(grace));
      return this;
    }

    /** As {@link #stopGrace(Duration)}, with a text such as "1h30m". */
    public Builder stopGrace(String text) {
      return stopGrace(Durations.parse("stopGrace", text));
    }

    /** Returns the job with its handler. */
    public Job run(Handler handler) {
      if (handler == null) {
        throw wrong("job \"%s\": handler is null", spec.getName());
      }
      checkRelations();
      checkRetry();
      return new Job(spec.build(), handler);
    }

    /** Returns the job with a handler that gives nothing. */
    public Job runs(Handler.OfNothing handler) {
      if (handler == null) {
        throw wrong("job \"%s\": handler is null", spec.getName());
      }
      return run(
          context -> {
            handler.run(context);
            return null;
          });
    }

    private void checkRelations() {
      if (spec.hasEvery() && spec.hasJitter()) {
        long jitter = Durations.toMillis(spec.getJitter());
        long period = Durations.toMillis(spec.getEvery().getPeriod());
        if (jitter >= period) {
          throw wrong(
              "job \"%s\": jitter %s: must be less than the period, %s",
              spec.getName(),
              Durations.text(Duration.ofMillis(jitter)),
              Durations.text(Duration.ofMillis(period)));
        }
      }
      if (spec.hasLease() && spec.hasHeartbeat()) {
        long lease = Durations.toMillis(spec.getLease());
        long heartbeat = Durations.toMillis(spec.getHeartbeat());
        if (heartbeat * HEARTBEATS_A_LEASE > lease) {
          throw wrong(
              "job \"%s\": heartbeat %s: must be at most a third of the lease, %s",
              spec.getName(),
              Durations.text(Duration.ofMillis(heartbeat)),
              Durations.text(Duration.ofMillis(lease)));
        }
      }
      if (spec.getOverlap() == OverlapPolicy.OVERLAP_POLICY_CANCEL
          && spec.getCatchUp().getPolicy() == CatchUpPolicy.CATCH_UP_POLICY_ALL) {
        throw wrong(
            "job \"%s\": catchUp ALL with overlap CANCEL: each slot caught up would cancel the one "
                + "before; use catchUp LATEST, or overlap QUEUE",
            spec.getName());
      }
    }

    private void checkRetry() {
      if (retry.getRetries() == 0) {
        if (!retrySaid.isEmpty()) {
          throw wrong(
              "job \"%s\": %s without retries: set retries to 1 or more",
              spec.getName(), retrySaid);
        }
        return;
      }
      if (retryDelay.compareTo(retryMaxDelay) > 0) {
        throw wrong(
            "job \"%s\": retryDelay %s: must be at most retryMaxDelay, %s",
            spec.getName(), Durations.text(retryDelay), Durations.text(retryMaxDelay));
      }
      spec.setRetry(retry);
    }

    private static int whole(String field, int value, int least, int most) {
      if (value < least || value > most) {
        throw wrong("%s %d: must be %d to %d", field, value, least, most);
      }
      return value;
    }

    private static int bytes(String text) {
      return text.getBytes(StandardCharsets.UTF_8).length;
    }
  }

  /**
   * Of a cron expression the number of fields and plain numbers are checked here. What needs the
   * whole grammar or a calendar is left to the sidecar, which checks every spec at registration.
   */
  private static final class CronFields {
    private static final int EXPRESSION_MAX = 1_000;
    private static final Pattern NUMBERS =
        Pattern.compile("([0-9]{1,2})(?:-([0-9]{1,2}))?(?:/[0-9]+)?");
    private static final String[] NAMES = {
      "second", "minute", "hour", "day of month", "month", "day of week"
    };
    private static final int[] LOW = {0, 0, 0, 1, 1, 0};
    private static final int[] HIGH = {59, 59, 23, 31, 12, 7};
    private static final String[] WANTED = {
      "0 to 59", "0 to 59", "0 to 23", "1 to 31", "1 to 12 or JAN to DEC", "0 to 7 or SUN to SAT"
    };

    static void check(String expression) {
      String shown =
          expression == null ? null : expression.substring(0, Math.min(80, expression.length()));
      if (expression == null || expression.length() > EXPRESSION_MAX) {
        throw wrong(
            "cron expression \"%s\": must be a text of at most %d characters",
            shown, EXPRESSION_MAX);
      }
      String stripped = expression.strip();
      if (stripped.startsWith("@every")) {
        throw wrong("cron expression \"%s\": use Job.every(name, \"10s\")", shown);
      }
      String[] texts = stripped.isEmpty() ? new String[0] : stripped.split("\\s+");
      if (texts.length == 1 && texts[0].startsWith("@")) {
        return;
      }
      int skipped = NAMES.length - texts.length;
      if (skipped != 0 && skipped != 1) {
        throw wrong(
            "cron expression \"%s\": must have five fields, or six with seconds first; it has %d",
            shown, texts.length);
      }
      for (int i = 0; i < texts.length; i++) {
        checkField(shown, texts[i], i + skipped);
      }
    }

    private static void checkField(String shown, String text, int field) {
      for (String item : text.split(",")) {
        Matcher match = NUMBERS.matcher(item);
        for (int group = 1; match.matches() && group <= 2; group++) {
          if (match.group(group) == null) {
            continue;
          }
          int number = Integer.parseInt(match.group(group));
          if (number < LOW[field] || number > HIGH[field]) {
            throw wrong(
                "cron expression \"%s\": %s is '%s': %d is outside %s",
                shown, NAMES[field], text, number, WANTED[field]);
          }
        }
      }
    }
  }
}

package io.anarchon.testee;

import com.google.gson.GsonBuilder;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonParser;
import io.anarchon.client.AnarchonClient;
import io.anarchon.client.AnarchonException;
import io.anarchon.client.CancelledException;
import io.anarchon.client.Durations;
import io.anarchon.client.Handler;
import io.anarchon.client.Job;
import io.anarchon.client.Permanent;
import io.anarchon.client.Retry;
import io.anarchon.client.RunContext;
import io.anarchon.client.Subscription;
import io.grpc.TlsChannelCredentials;
import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.time.ZoneOffset;
import java.time.format.DateTimeFormatter;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;

/**
 * Java's testee: see tests/conformance/README.md. It decides nothing; it shows what the client
 * does.
 */
final class Testee {
  private static final Set<String> KEYS =
      Set.of("jobs", "max_concurrency", "stop_grace", "on_lease_lost", "ca_file", "padding");
  private static final DateTimeFormatter MOMENT =
      DateTimeFormatter.ofPattern("yyyy-MM-dd'T'HH:mm:ss.SSS'Z'").withZone(ZoneOffset.UTC);
  private static final CountDownLatch RELEASED = new CountDownLatch(1);

  private Testee() {}

  private static void emit(String what, Object... keysAndValues) {
    Map<String, Object> facts = new LinkedHashMap<>();
    facts.put("what", what);
    for (int i = 0; i < keysAndValues.length; i += 2) {
      facts.put((String) keysAndValues[i], keysAndValues[i + 1]);
    }
    byte[] line =
        (new GsonBuilder().serializeNulls().create().toJson(facts) + "\n")
            .getBytes(StandardCharsets.UTF_8);
    synchronized (Testee.class) {
      System.out.write(line, 0, line.length);
      System.out.flush();
    }
  }

  private static void tell(RunContext run, CancelledException told) {
    boolean lost = told instanceof CancelledException.LeaseLost;
    emit("cancelled", "token", run.token(), "reason", told.reason().name(), "lost", lost);
  }

  // ── What the handlers do between `started` and `ended` ────────────────────────────────────────

  private static Object shows(RunContext run) {
    boolean limited = run.deadline().filter(end -> end.isAfter(Instant.now())).isPresent();
    emit(
        "context",
        "token",
        run.token(),
        "job",
        run.job(),
        "slot",
        run.slot(),
        "attempt",
        run.attempt(),
        "fence",
        Long.toString(run.fence()),
        "instance_id",
        run.instanceId(),
        "trigger",
        run.trigger().name().toLowerCase(java.util.Locale.ROOT),
        "payload",
        run.payloadText(),
        "scheduled_at",
        MOMENT.format(run.scheduledAt()),
        "has_deadline",
        limited,
        "remaining_ms",
        run.remaining().map(Duration::toMillis).orElse(null),
        "cancelled",
        run.isCancelled());
    return null;
  }

  private static Object confirms(RunContext run) {
    String answer = "confirmed";
    try {
      run.confirm();
    } catch (CancelledException.LeaseLost error) {
      answer = "lost";
    } catch (AnarchonException error) {
      answer = "unknown";
    } catch (InterruptedException error) {
      answer = isLost(run) ? "lost" : "unknown";
    }
    emit("confirm", "token", run.token(), "answer", answer);
    return null;
  }

  private static boolean isLost(RunContext run) {
    try {
      run.check();
      return false;
    } catch (CancelledException told) {
      return told instanceof CancelledException.LeaseLost;
    }
  }

  private static Object waits(RunContext run) throws InterruptedException {
    try {
      new CountDownLatch(1).await();
      return null;
    } catch (InterruptedException interrupted) {
      try {
        run.check();
      } catch (CancelledException told) {
        tell(run, told);
      }
      throw interrupted;
    }
  }

  private static Object waitsAnyway(RunContext run) {
    try {
      return waits(run);
    } catch (InterruptedException disobeyed) {
      return "done anyway";
    }
  }

  private static Object polls(RunContext run) {
    while (true) {
      try {
        run.check();
        Thread.sleep(10);
      } catch (CancelledException told) {
        tell(run, told);
        throw told;
      } catch (InterruptedException interrupted) {
        // The next check says why.
      }
    }
  }

  private static Object lingers(RunContext run) {
    CancelledException last = null;
    while (true) {
      try {
        run.check();
      } catch (CancelledException told) {
        // Its class says whether the attempt is lost.
        if (last == null || last.reason() != told.reason() || last.getClass() != told.getClass()) {
          tell(run, told);
        }
        last = told;
      }
      try {
        if (!RELEASED.await(10, TimeUnit.MILLISECONDS)) {
          continue;
        }
      } catch (InterruptedException disobeyed) {
        continue;
      }
      if (last != null) {
        throw last;
      }
      return "released";
    }
  }

  private static Object isStubborn(RunContext run) {
    while (true) {
      try {
        RELEASED.await();
        return "late";
      } catch (InterruptedException disobeyed) {
        // It looks at nothing.
      }
    }
  }

  private static Handler shown(Handler does) {
    return run -> {
      emit(
          "started",
          "token",
          run.token(),
          "job",
          run.job(),
          "slot",
          run.slot(),
          "attempt",
          run.attempt());
      try {
        return does.run(run);
      } finally {
        emit("ended", "token", run.token());
      }
    };
  }

  private static Job job(String name) {
    Job.Builder every = Job.every(name, "1h");
    return switch (name) {
      case "succeed" -> every.run(shown(RunContext::payloadText));
      case "json" -> every.run(shown(run -> jsonValue()));
      case "fail" ->
          every.run(
              shown(
                  run -> {
                    throw new RuntimeException(run.payloadText());
                  }));
      case "retry" ->
          every.run(
              shown(
                  run -> {
                    throw run.payload().length == 0
                        ? new Retry("again")
                        : new Retry("again", run.payloadText());
                  }));
      case "permanent" ->
          every.run(
              shown(
                  run -> {
                    throw new Permanent(run.payloadText());
                  }));
      case "context" -> every.run(shown(Testee::shows));
      case "confirm" -> every.run(shown(Testee::confirms));
      case "wait" -> every.run(shown(Testee::waits));
      case "anyway" -> every.run(shown(Testee::waitsAnyway));
      case "poll" -> every.run(shown(Testee::polls));
      case "linger" -> every.run(shown(Testee::lingers));
      case "stubborn" -> every.run(shown(Testee::isStubborn));
      case "policies" -> withPolicies(every).run(shown(RunContext::payloadText));
      case "cron" ->
          Job.cron(name, "0 8 * * *").timeZone("Europe/Athens").run(shown(RunContext::payloadText));
      case "brief" -> every.timeout("1s").retries(0).run(shown(Testee::waits));
      case "named" -> Job.byName(name).run(shown(RunContext::payloadText));
      default -> throw unfit("no such job: " + name);
    };
  }

  private static Map<String, Object> jsonValue() {
    Map<String, Object> value = new LinkedHashMap<>();
    value.put("rows", 3);
    value.put("name", "Ωmega");
    return value;
  }

  private static Job.Builder withPolicies(Job.Builder job) {
    return job.offset("10m")
        .jitter("5s")
        .timeout("2m")
        .heartbeat("4s")
        .lease("20s")
        .overlap(Job.Overlap.QUEUE)
        .catchUp(Job.CatchUp.ALL)
        .catchUpWindow("6h")
        .catchUpLimit(7)
        .startDeadline("30s")
        .maxAttempts(4)
        .retries(5)
        .retryDelay("2s")
        .retryFactor(1.5)
        .retryMaxDelay("10m")
        .concurrency(2)
        .labels(Map.of("team", "blue"))
        .cancelGrace("3s")
        .stopGrace("15s");
  }

  private static Job padding(int number) {
    Map<String, String> labels = new LinkedHashMap<>();
    for (int n = 1; n <= 16; n++) {
      labels.put(String.format("%02d", n) + "k".repeat(126), "v".repeat(128));
    }
    return Job.every("padding-" + number, "1h").labels(labels).run(RunContext::payloadText);
  }

  // ── The client, and what it is told ───────────────────────────────────────────────────────────

  private static IllegalArgumentException unfit(String why) {
    System.err.println("ANARCHON_TESTEE: " + why);
    Runtime.getRuntime().halt(2);
    return new IllegalArgumentException(why);
  }

  private static JsonObject read() {
    String text = System.getenv("ANARCHON_TESTEE");
    try {
      JsonObject config = JsonParser.parseString(text == null ? "" : text).getAsJsonObject();
      if (!config.has("jobs") || !KEYS.containsAll(config.keySet())) {
        throw unfit("has the keys " + config.keySet());
      }
      return config;
    } catch (JsonParseException | IllegalStateException error) {
      throw unfit(error.getMessage());
    }
  }

  private static Subscription subscribe(JsonObject config) throws IOException {
    AnarchonClient.Builder client = AnarchonClient.builder();
    if (config.has("max_concurrency")) {
      client.maxConcurrency(config.get("max_concurrency").getAsInt());
    }
    if (config.has("stop_grace")) {
      client.stopGrace(config.get("stop_grace").getAsString());
    }
    if (config.has("on_lease_lost") && config.get("on_lease_lost").getAsString().equals("exit")) {
      client.exitOnLeaseLost();
    }
    if (config.has("ca_file")) {
      File authority = new File(config.get("ca_file").getAsString());
      client.credentials(TlsChannelCredentials.newBuilder().trustManager(authority).build());
    }
    List<Job> jobs = new ArrayList<>();
    for (JsonElement name : config.getAsJsonArray("jobs")) {
      jobs.add(job(name.getAsString()));
    }
    int more = config.has("padding") ? config.get("padding").getAsInt() : 0;
    for (int number = 1; number <= more; number++) {
      jobs.add(padding(number));
    }
    return client.build().subscribe(jobs.toArray(new Job[0]));
  }

  private static void listen(Subscription subscription) {
    BufferedReader lines =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    try {
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        if (line.equals("release")) {
          RELEASED.countDown();
        } else if (line.equals("stop")) {
          subscription.stop();
        } else if (line.startsWith("stop ")) {
          subscription.stop(Durations.parse(line.substring("stop ".length())));
        }
      }
    } catch (IOException gone) {
      // As its end.
    }
    Runtime.getRuntime().halt(3); // the suite is gone
  }

  private static String kindOf(AnarchonException error) {
    if (error instanceof AnarchonException.Unsupported) {
      return "unsupported";
    } else if (error instanceof AnarchonException.Version) {
      return "version";
    } else if (error instanceof AnarchonException.Credentials) {
      return "credentials";
    } else if (error instanceof AnarchonException.Refused) {
      return "refused";
    } else if (error instanceof AnarchonException.SessionReplaced) {
      return "replaced";
    }
    boolean isSetup =
        error instanceof AnarchonException.WrongJob
            || error instanceof AnarchonException.WrongSetup;
    return isSetup ? "setup" : "other";
  }

  public static void main(String[] arguments) throws IOException, InterruptedException {
    JsonObject config = read();
    int status = 0;
    try {
      Subscription subscription = subscribe(config);
      // A JVM that is told to shut down ends with 143 once its hooks have run: this one says the
      // end.
      Thread main = Thread.currentThread();
      Runtime.getRuntime().addShutdownHook(new Thread(() -> waitFor(main)));
      subscription.stopAtShutdown();
      Thread listener = new Thread(() -> listen(subscription));
      listener.setDaemon(true);
      listener.start();
      try {
        emit("ready", "instance", subscription.ready().get());
      } catch (ExecutionException neverReady) {
        // What ended it comes now.
      }
      subscription.await();
      emit("closed", "error", "", "message", "");
    } catch (AnarchonException error) {
      status = 1;
      emit("closed", "error", kindOf(error), "message", error.getMessage());
    }
    Runtime.getRuntime().halt(status); // handlers may still run
  }

  private static void waitFor(Thread main) {
    try {
      main.join();
    } catch (InterruptedException nobodys) {
      Thread.currentThread().interrupt();
    }
  }
}

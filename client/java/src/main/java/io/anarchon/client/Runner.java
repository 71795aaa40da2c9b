package io.anarchon.client;

import io.anarchon.v1.Assignment;
import io.anarchon.v1.Outcome;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.function.BiConsumer;
import org.slf4j.Logger;

/** Runs the handlers of one session, each in a thread of its own. */
final class Runner {
  /** Renews a lease, or throws. */
  interface Confirmer {
    void confirm(String token) throws InterruptedException;
  }

  private record Attempt(RunContext context, Orders orders, long startedAt) {}

  private final Map<String, Job> jobs;
  private final Clock clock;
  private final Orders.Trust trust;
  private final ExecutorService threads;
  private final BiConsumer<String, Outcome> onEnd;
  private final Runnable onLateEnd;
  private final Confirmer confirmer;
  private final Map<String, Attempt> attempts = new ConcurrentHashMap<>();
  private volatile boolean isAbandoned;

  Runner(
      Map<String, Job> jobs,
      Clock clock,
      Orders.Trust trust,
      ExecutorService threads,
      BiConsumer<String, Outcome> onEnd,
      Runnable onLateEnd,
      Confirmer confirmer) {
    this.jobs = jobs;
    this.clock = clock;
    this.trust = trust;
    this.threads = threads;
    this.onEnd = onEnd;
    this.onLateEnd = onLateEnd;
    this.confirmer = confirmer;
  }

  boolean isRunning() {
    return !attempts.isEmpty();
  }

  /** Runs the handler of an attempt. */
  void start(Assignment assignment) {
    String token = assignment.getToken();
    Orders orders = new Orders(clock, trust);
    RunContext context = new RunContext(assignment, orders, () -> confirmer.confirm(token));
    Attempt attempt = new Attempt(context, orders, clock.now());
    attempts.put(token, attempt);
    Handler handler = jobs.get(assignment.getJob()).handler();
    try {
      threads.execute(() -> run(token, attempt, handler));
    } catch (OutOfMemoryError noThread) { // as Java calls it
      Outcome.Builder outcome = Outcomes.of(noThread, orders);
      ended(token, attempt, outcome);
      tell(attempt, outcome, noThread);
    }
  }

  private void run(String token, Attempt attempt, Handler handler) {
    attempt.context.speak();
    try {
      Throwable thrown = null;
      Outcome.Builder outcome;
      attempt.orders.begin();
      try {
        attempt.orders.check(); // what was told to stop before it had a thread never begins
        // The value becomes text here, because that runs the handler's own code: where it throws,
        // the handler has failed.
        outcome = Outcomes.of(handler.run(attempt.context));
      } catch (Throwable error) {
        thrown = error;
        outcome = Outcomes.of(error, attempt.orders);
      } finally {
        attempt.orders.end();
      }
      ended(token, attempt, outcome);
      // After the report: what the application's logging does must not hold it up.
      tell(attempt, outcome, thrown);
    } finally {
      attempt.context.hush();
    }
  }

  private void ended(String token, Attempt attempt, Outcome.Builder outcome) {
    attempts.remove(token);
    if (isAbandoned) {
      onLateEnd.run();
      attempt
          .context
          .log()
          .warn("{} ended after its client had stopped: its result is lost", attempt.context);
      return;
    }
    outcome.setElapsed(Durations.toWire(Duration.ofMillis(clock.now() - attempt.startedAt)));
    onEnd.accept(token, outcome.build());
  }

  /** Tells a handler to stop, or that its trust has ended. */
  void cancel(String token, int reason, String message, boolean trusted) {
    Attempt attempt = attempts.get(token);
    if (attempt != null) { // else it has just ended
      attempt.orders.cancel(reason, message, trusted);
    }
  }

  /** Tells all that is left that nobody renews its lease any more. Its results are lost. */
  void abandon() {
    isAbandoned = true;
    attempts.forEach(
        (token, attempt) ->
            attempt.orders.cancel(CancelReason.LEASE_LOST.wire(), "the client has stopped", false));
  }

  /** Logs how an attempt ended that has not succeeded: people look there first. */
  private static void tell(Attempt attempt, Outcome.Builder outcome, Throwable thrown) {
    Logger log = attempt.context.log();
    if (outcome.hasFailure()) {
      if (thrown instanceof Retry) {
        log.warn(
            "{} failed, to be tried again: {}", attempt.context, outcome.getFailure().getMessage());
      } else {
        log.error("{} failed", attempt.context, thrown);
      }
    } else if (outcome.hasStopped()) {
      String words = attempt.orders.words();
      switch (CancelReason.of(outcome.getStopped().getReasonValue())) {
        case SHUTDOWN, SUPERSEDED, REQUESTED -> log.info("{} stopped ({})", attempt.context, words);
        default -> log.warn("{} stopped ({})", attempt.context, words);
      }
    }
  }
}

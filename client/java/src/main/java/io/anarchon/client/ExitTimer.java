package io.anarchon.client;

import java.util.function.IntConsumer;

/**
 * Ends the process when a lease is over whose handler still runs, whatever the session's loop does.
 * Waits in a thread of its own. Safe to use in any thread.
 */
final class ExitTimer {
  /** Java's waits stop while the machine sleeps, so the clock that counts sleep is looked at. */
  private static final long LOOK_EVERY_MS = 1_000;

  private static final long WORDS_MS = 100;
  private static final int STATUS = 1;
  private final Clock clock;
  private final IntConsumer exit;
  private long at = Session.NEVER;
  private boolean isEnded;

  ExitTimer(Clock clock, IntConsumer exit) {
    this.clock = clock;
    this.exit = exit;
  }

  /** One that nobody waits for. */
  static ExitTimer none(Clock clock) {
    return new ExitTimer(clock, status -> {});
  }

  /** One that ends the process, without its shutdown hooks: they may wait for the handler. */
  static ExitTimer started(Clock clock) {
    ExitTimer timer = new ExitTimer(clock, ExitTimer::endProcess);
    Thread thread = new Thread(timer::run, "anarchon-exit");
    thread.setDaemon(true);
    thread.start();
    return timer;
  }

  /** Says why in another thread: a handler may hold what it takes to print. */
  private static void endProcess(int status) {
    try {
      Thread words =
          new Thread(
              () ->
                  System.err.println("anarchon: a lease is over, and its handler has not stopped"));
      words.setDaemon(true);
      words.start();
      words.join(WORDS_MS);
    } catch (InterruptedException nobodys) {
      // It ends in any case.
    } finally {
      Runtime.getRuntime().halt(status);
    }
  }

  /** Ends the process then; never, for not at all. */
  synchronized void set(long at) {
    boolean isSooner = at < this.at;
    this.at = at;
    if (isSooner) {
      notifyAll();
    }
  }

  /** Lets go for good. */
  synchronized void end() {
    isEnded = true;
    notifyAll();
  }

  synchronized void run() {
    while (!isEnded) {
      long left = at - clock.now();
      if (left <= 0) {
        exit.accept(STATUS);
        return;
      }
      try {
        wait(at == Session.NEVER ? 0 : Math.min(left, LOOK_EVERY_MS));
      } catch (InterruptedException nobodys) {
        // Nobody has this thread to interrupt it, and a lease is not to outlive it.
      }
    }
  }
}

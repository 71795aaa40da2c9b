package io.anarchon.client;

/**
 * What one attempt has been told, by the sidecar or by the clock. Safe to use in any thread.
 *
 * <p>Trust that has ended stays ended for the attempt, also when the session regains it: in between
 * another instance may have begun.
 */
final class Orders {
  static final String NOT_ANSWERED = "no keep-alive was answered in time";

  /** Until when the session is to be trusted. Written by the session's thread, read by any. */
  static final class Trust {
    private volatile long end;

    Trust(long end) {
      this.end = end;
    }

    long end() {
      return end;
    }

    void set(long end) {
      this.end = end;
    }
  }

  private final Clock clock;
  private final Trust trust;
  private boolean told;
  private boolean lost;
  private int wireReason;
  private String message = "";
  private Thread handler;
  private boolean ended;

  Orders(Clock clock, Trust trust) {
    this.clock = clock;
    this.trust = trust;
  }

  Clock clock() {
    return clock;
  }

  /** The handler begins, in this thread: an interrupt that came before is delivered. */
  synchronized void begin() {
    handler = Thread.currentThread();
    if (told) {
      handler.interrupt();
    }
  }

  /** The handler has ended: its thread is not ours to interrupt any more. */
  synchronized void end() {
    ended = true;
    handler = null;
    Thread.interrupted(); // what it did not take is not for the next one
  }

  /** Tells the attempt to stop. The first reason stays. */
  synchronized void cancel(int reason, String why, boolean trusted) {
    boolean isNews = !told || (!lost && !trusted);
    if (!told) {
      told = true;
      wireReason = reason;
      message = why;
    }
    lost = lost || !trusted;
    notifyAll();
    if (isNews && !ended && handler != null) {
      handler.interrupt();
    }
  }

  /** Lets the clock have its word: ends the attempt's trust if its time is over. */
  void look() {
    if (clock.now() >= trust.end()) {
      cancel(io.anarchon.v1.CancelReason.CANCEL_REASON_LEASE_LOST_VALUE, NOT_ANSWERED, false);
    }
  }

  /** Throws a CancelledException if the attempt is to stop. */
  void check() {
    look();
    synchronized (this) {
      if (told) {
        if (Thread.currentThread() == handler) {
          Thread.interrupted(); // the exception takes its place, and what tidies up may wait
        }
        throw CancelledException.of(CancelReason.of(wireReason), message, lost);
      }
    }
  }

  synchronized boolean isTold() {
    return told;
  }

  synchronized boolean isLost() {
    return lost;
  }

  /** The number that came with the first cancellation. */
  synchronized int wireReason() {
    return wireReason;
  }

  synchronized String words() {
    String reason = CancelReason.of(wireReason).name();
    return message.isEmpty() ? reason : reason + ": " + message;
  }
}

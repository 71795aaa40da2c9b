package io.anarchon.client;

import java.time.Duration;

/**
 * Thrown by a handler: the attempt failed, and is to be tried again after a pause of its own.
 * Whether there is a next attempt is the policy's to say: {@code retries}, by default none.
 */
public final class Retry extends AnarchonException {
  private static final long serialVersionUID = 1L;
  private final Duration after;

  /** Tries again after the policy's pause. */
  public Retry(String message) {
    this(message, (Duration) null, null);
  }

  /** Tries again after the given pause: whole milliseconds, more than zero. */
  public Retry(String message, Duration after) {
    this(message, after, null);
  }

  /** As {@link #Retry(String, Duration)}, with a text such as "90s". */
  public Retry(String message, String after) {
    this(message, Durations.parse("after", after), null);
  }

  /** Tries again after the policy's pause, because of another exception. */
  public Retry(String message, Throwable cause) {
    this(message, null, cause);
  }

  /**
   * Tries again after the given pause (null: the policy's), because of another exception, of which
   * history shows the type.
   *
   * @throws AnarchonException.WrongJob for a bad pause
   */
  public Retry(String message, Duration after, Throwable cause) {
    super(message, cause);
    if (after != null) {
      Durations.check("after", after);
      if (after.isZero()) {
        throw new WrongJob("Retry after 0s: must be more than zero");
      }
    }
    this.after = after;
  }

  Duration after() {
    return after;
  }
}

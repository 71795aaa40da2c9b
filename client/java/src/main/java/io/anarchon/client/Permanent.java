package io.anarchon.client;

/**
 * Thrown by a handler: the attempt failed, and trying again is of no use. The run has failed,
 * whatever {@code retries} says.
 */
public final class Permanent extends AnarchonException {
  private static final long serialVersionUID = 1L;

  /** Fails for good. */
  public Permanent(String message) {
    super(message);
  }

  /** Fails for good because of another exception, of which history shows the type. */
  public Permanent(String message, Throwable cause) {
    super(message, cause);
  }
}

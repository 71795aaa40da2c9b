package io.anarchon.client;

/** The attempt has been asked to stop: finish quickly, or just let this through. */
public class CancelledException extends AnarchonException {
  private static final long serialVersionUID = 1L;
  private final CancelReason reason;

  CancelledException(CancelReason reason, String message) {
    super(reason.name() + (message.isEmpty() ? "" : ": " + message));
    this.reason = reason;
  }

  /** Returns why. */
  public CancelReason reason() {
    return reason;
  }

  /** The attempt can no longer be trusted to be the only one: take no further step. */
  public static class LeaseLost extends CancelledException {
    private static final long serialVersionUID = 1L;

    LeaseLost(CancelReason reason, String message) {
      super(reason, message);
    }
  }

  /** Another attempt of the run has begun: take no further step. */
  public static final class Fenced extends LeaseLost {
    private static final long serialVersionUID = 1L;

    Fenced(CancelReason reason, String message) {
      super(reason, message);
    }
  }

  static CancelledException of(CancelReason reason, String message, boolean lost) {
    if (!lost) {
      return new CancelledException(reason, message);
    }
    return reason == CancelReason.FENCED
        ? new Fenced(reason, message)
        : new LeaseLost(reason, message);
  }
}

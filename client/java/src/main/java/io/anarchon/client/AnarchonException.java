package io.anarchon.client;

/** Everything that Anarchon throws. */
public class AnarchonException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  AnarchonException(String message) {
    super(message);
  }

  AnarchonException(String message, Throwable cause) {
    super(message, cause);
  }

  /** A job, its handler or one of its policies is wrong. The message says what would be right. */
  public static final class WrongJob extends AnarchonException {
    private static final long serialVersionUID = 1L;

    WrongJob(String message) {
      super(message);
    }
  }

  /** The client is set up wrongly: its address, token file or limits. */
  public static final class WrongSetup extends AnarchonException {
    private static final long serialVersionUID = 1L;

    WrongSetup(String message) {
      super(message);
    }
  }

  /** What the sidecar answered, or that it did not. */
  public static class Sidecar extends AnarchonException {
    private static final long serialVersionUID = 1L;
    private final String reason;

    Sidecar(String message, String reason) {
      super(message);
      this.reason = reason;
    }

    /** Returns a word of the protocol's ErrorReason, or "". */
    public String reason() {
      return reason;
    }
  }

  /** The sidecar is not there, is going away, or cannot reach its store. It may be soon. */
  public static final class Unavailable extends Sidecar {
    private static final long serialVersionUID = 1L;

    Unavailable(String message, String reason) {
      super(message, reason);
    }
  }

  /** The sidecar will never accept this request. The message is its own. */
  public static class Refused extends Sidecar {
    private static final long serialVersionUID = 1L;

    Refused(String message, String reason) {
      super(message, reason);
    }
  }

  /** The sidecar's backend or version cannot do it. */
  public static final class Unsupported extends Refused {
    private static final long serialVersionUID = 1L;

    Unsupported(String message, String reason) {
      super(message, reason);
    }
  }

  /** Client and sidecar are too far apart in version. */
  public static final class Version extends Refused {
    private static final long serialVersionUID = 1L;

    Version(String message, String reason) {
      super(message, reason);
    }
  }

  /** The call token is missing or wrong. */
  public static final class Credentials extends Refused {
    private static final long serialVersionUID = 1L;

    Credentials(String message, String reason) {
      super(message, reason);
    }
  }

  /** There is no such job, run or instance. */
  public static final class NotFound extends Sidecar {
    private static final long serialVersionUID = 1L;

    NotFound(String message, String reason) {
      super(message, reason);
    }
  }

  /** The sidecar does not know the session. The client subscribes again by itself. */
  public static final class SessionNotFound extends Sidecar {
    private static final long serialVersionUID = 1L;

    SessionNotFound(String message, String reason) {
      super(message, reason);
    }
  }

  /** Another process uses the session. */
  public static final class SessionReplaced extends Sidecar {
    private static final long serialVersionUID = 1L;

    SessionReplaced(String message, String reason) {
      super(message, reason);
    }
  }

  /** The attempt could not be confirmed at the store now. Do not take the step; try again. */
  public static final class NotConfirmed extends AnarchonException {
    private static final long serialVersionUID = 1L;

    NotConfirmed(String message) {
      super(message);
    }
  }

  /**
   * Returns what a status means: the reason decides where it is known, else the code; any other
   * code is taken as "not now".
   */
  static Sidecar ofStatus(io.grpc.Status.Code code, String reason, String message) {
    String text = message == null || message.isEmpty() ? code.name() : message;
    switch (reason) {
      case "SESSION_NOT_FOUND":
        return new SessionNotFound(text, reason);
      case "SESSION_REPLACED":
        return new SessionReplaced(text, reason);
      case "JOB_NOT_FOUND", "RUN_NOT_FOUND", "INSTANCE_NOT_FOUND":
        return new NotFound(text, reason);
      case "LIMIT_EXCEEDED":
        return new Refused(text, reason);
      case "UNSUPPORTED":
        return new Unsupported(text, reason);
      case "VERSION":
        return new Version(text, reason);
      case "BAD_CREDENTIALS":
        return new Credentials(text, reason);
      default:
        break;
    }
    switch (code) {
      case INVALID_ARGUMENT, FAILED_PRECONDITION:
        return new Refused(text, reason);
      case UNIMPLEMENTED:
        return new Version(text, reason);
      case UNAUTHENTICATED, PERMISSION_DENIED:
        return new Credentials(text, reason);
      case NOT_FOUND:
        return new NotFound(text, reason);
      default:
        return new Unavailable(text, reason);
    }
  }
}

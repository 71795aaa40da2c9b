package io.anarchon.client;

/** Why an attempt is to stop. */
public enum CancelReason {
  /** The attempt outlived its timeout. */
  TIMEOUT,
  /** The lease could not be renewed in time. */
  LEASE_LOST,
  /** Another attempt has begun. */
  FENCED,
  /** The instance is stopping and its grace is used up. */
  SHUTDOWN,
  /** A newer slot of the job replaces this run. */
  SUPERSEDED,
  /** Somebody cancelled the run. */
  REQUESTED,
  /** A reason that this version of the client does not know. */
  OTHER;

  static CancelReason of(int wire) {
    return switch (wire) {
      case io.anarchon.v1.CancelReason.CANCEL_REASON_TIMEOUT_VALUE -> TIMEOUT;
      case io.anarchon.v1.CancelReason.CANCEL_REASON_LEASE_LOST_VALUE -> LEASE_LOST;
      case io.anarchon.v1.CancelReason.CANCEL_REASON_FENCED_VALUE -> FENCED;
      case io.anarchon.v1.CancelReason.CANCEL_REASON_SHUTDOWN_VALUE -> SHUTDOWN;
      case io.anarchon.v1.CancelReason.CANCEL_REASON_SUPERSEDED_VALUE -> SUPERSEDED;
      case io.anarchon.v1.CancelReason.CANCEL_REASON_REQUESTED_VALUE -> REQUESTED;
      default -> OTHER;
    };
  }

  int wire() {
    return switch (this) {
      case TIMEOUT -> io.anarchon.v1.CancelReason.CANCEL_REASON_TIMEOUT_VALUE;
      case LEASE_LOST -> io.anarchon.v1.CancelReason.CANCEL_REASON_LEASE_LOST_VALUE;
      case FENCED -> io.anarchon.v1.CancelReason.CANCEL_REASON_FENCED_VALUE;
      case SHUTDOWN -> io.anarchon.v1.CancelReason.CANCEL_REASON_SHUTDOWN_VALUE;
      case SUPERSEDED -> io.anarchon.v1.CancelReason.CANCEL_REASON_SUPERSEDED_VALUE;
      case REQUESTED -> io.anarchon.v1.CancelReason.CANCEL_REASON_REQUESTED_VALUE;
      case OTHER -> io.anarchon.v1.CancelReason.CANCEL_REASON_UNSPECIFIED_VALUE;
    };
  }

  /** Whether an attempt that is cancelled for the reason is no longer ours. */
  static boolean endsTrust(int wire) {
    return wire == io.anarchon.v1.CancelReason.CANCEL_REASON_LEASE_LOST_VALUE
        || wire == io.anarchon.v1.CancelReason.CANCEL_REASON_FENCED_VALUE;
  }
}

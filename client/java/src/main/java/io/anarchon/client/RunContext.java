package io.anarchon.client;

import com.google.protobuf.ByteString;
import io.anarchon.v1.Assignment;
import java.time.Duration;
import java.time.Instant;
import java.util.Optional;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;
import org.slf4j.MDC;

/** One attempt at one run of a job, as its handler sees it. Safe to use in any thread. */
public final class RunContext {
  /** What caused a run. */
  public enum Trigger {
    /** The schedule. */
    SCHEDULE,
    /** Somebody triggered it. */
    MANUAL,
    /** It was missed, and is caught up. */
    CATCH_UP,
    /** A cause that this version of the client does not know. */
    OTHER;

    static Trigger of(io.anarchon.v1.Trigger wire) {
      return switch (wire) {
        case TRIGGER_SCHEDULE -> SCHEDULE;
        case TRIGGER_MANUAL -> MANUAL;
        case TRIGGER_CATCH_UP -> CATCH_UP;
        default -> OTHER;
      };
    }

    int wire() {
      return switch (this) {
        case SCHEDULE -> io.anarchon.v1.Trigger.TRIGGER_SCHEDULE_VALUE;
        case MANUAL -> io.anarchon.v1.Trigger.TRIGGER_MANUAL_VALUE;
        case CATCH_UP -> io.anarchon.v1.Trigger.TRIGGER_CATCH_UP_VALUE;
        case OTHER -> io.anarchon.v1.Trigger.TRIGGER_UNSPECIFIED_VALUE;
      };
    }
  }

  /** Renews a lease at the store, or throws. */
  @FunctionalInterface
  interface Confirmer {
    void confirm() throws InterruptedException;
  }

  private static final Logger LOG = LoggerFactory.getLogger("anarchon.job");
  private final Assignment assignment;
  private final Orders orders;
  private final Confirmer confirmer;
  private final long endsAt;
  private final Instant deadline;

  RunContext(Assignment assignment, Orders orders, Confirmer confirmer) {
    this.assignment = assignment;
    this.orders = orders;
    this.confirmer = confirmer;
    if (assignment.hasTimeout()) {
      long left = Durations.toMillis(assignment.getTimeout());
      endsAt = orders.clock().now() + left;
      deadline = Instant.now().plusMillis(left);
    } else {
      endsAt = Session.NEVER;
      deadline = null;
    }
  }

  /** Returns the job's name. */
  public String job() {
    return assignment.getJob();
  }

  /** Returns the slot: milliseconds since 1970-01-01T00:00:00Z. */
  public long slot() {
    return assignment.getSlot();
  }

  /** Returns the slot as a time. */
  public Instant scheduledAt() {
    return Instant.ofEpochMilli(assignment.getSlot());
  }

  /** Returns 1 at first, 2 or more after a takeover or a failure. */
  public int attempt() {
    return assignment.getAttempt();
  }

  /** Returns what names this attempt. Opaque. */
  public String token() {
    return assignment.getToken();
  }

  /**
   * Returns what grows with every claim of the job: for systems downstream that must refuse a late
   * writer.
   */
  public long fence() {
    return assignment.getFence();
  }

  /** Returns the instance that holds the claim, as history shows it. */
  public String instanceId() {
    return assignment.getInstanceId();
  }

  /** Returns what caused the run. */
  public Trigger trigger() {
    return Trigger.of(assignment.getTrigger());
  }

  /** Returns what was given when the run was triggered; empty for scheduled runs. */
  public byte[] payload() {
    return assignment.getPayload().toByteArray();
  }

  /** Returns the payload as text. */
  public String payloadText() {
    ByteString payload = assignment.getPayload();
    return payload.toStringUtf8();
  }

  /** Returns when the attempt's timeout is over, by this machine's clock. Empty: never. */
  public Optional<Instant> deadline() {
    return Optional.ofNullable(deadline);
  }

  /** Returns what is left of the attempt's timeout, never less than zero. Empty: no limit. */
  public Optional<Duration> remaining() {
    return endsAt == Session.NEVER
        ? Optional.empty()
        : Optional.of(Duration.ofMillis(Math.max(0, endsAt - orders.clock().now())));
  }

  /** Returns whether the attempt is to stop. */
  public boolean isCancelled() {
    orders.look();
    return orders.isTold();
  }

  /**
   * Returns a logger ({@code anarchon.job}); while the handler runs, the MDC of its thread says of
   * which attempt it speaks: {@code job}, {@code slot}, {@code attempt}.
   */
  public Logger log() {
    return LOG;
  }

  /**
   * Throws if the attempt is to stop, or if its lease can no longer be trusted. Cheap: no call is
   * made, and the clock is asked. Where it throws in the handler's own thread it takes the place of
   * the interrupt, so that what tidies up may wait.
   *
   * @throws CancelledException if it is to stop; where the attempt is no longer ours, its subclass
   *     {@link CancelledException.LeaseLost} or {@link CancelledException.Fenced}
   */
  public void check() {
    orders.check();
  }

  /**
   * Has the lease renewed at the store now: the thing to do just before what cannot be undone.
   * Takes one round trip to the store.
   *
   * @throws CancelledException as {@link #check} does
   * @throws AnarchonException.NotConfirmed if it cannot be told now
   * @throws InterruptedException if the attempt is told to stop meanwhile
   */
  public void confirm() throws InterruptedException {
    check();
    confirmer.confirm();
    check();
  }

  /**
   * Waits, but no longer than until a cancellation; then throws as {@link #check} does.
   *
   * @throws InterruptedException if the thread is interrupted by somebody else
   */
  public void sleep(Duration duration) throws InterruptedException {
    Durations.check("duration", duration);
    long end = System.nanoTime() + duration.toNanos();
    synchronized (orders) {
      long left = end - System.nanoTime();
      while (left > 0 && !orders.isTold()) {
        try {
          orders.wait(left / 1_000_000, (int) (left % 1_000_000));
        } catch (InterruptedException error) {
          if (!orders.isTold()) {
            throw error;
          }
        }
        left = end - System.nanoTime();
      }
    }
    check();
  }

  /** As {@link #sleep(Duration)}, with a text such as "10s". */
  public void sleep(String duration) throws InterruptedException {
    sleep(Durations.parse("duration", duration));
  }

  /** Sets the MDC of the handler's thread. */
  void speak() {
    MDC.put("job", job());
    MDC.put("slot", Long.toString(slot()));
    MDC.put("attempt", Integer.toString(attempt()));
  }

  void hush() {
    MDC.remove("job");
    MDC.remove("slot");
    MDC.remove("attempt");
  }

  @Override
  public String toString() {
    return Session.labelOf(assignment);
  }
}

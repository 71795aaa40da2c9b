package io.anarchon.client;

import com.google.protobuf.ByteString;
import io.anarchon.v1.Assignment;
import java.nio.charset.StandardCharsets;
import java.time.Duration;

/**
 * One attempt for users' own tests of a handler, without a sidecar:
 *
 * <pre>{@code
 * TestRun run = TestRun.builder().payload("42").build();
 * assertEquals("42 rows", run.call(job.handler()));
 * }</pre>
 *
 * <p>It is trusted until the test cancels it. {@link FakeSidecar} is for a whole client.
 */
public final class TestRun {
  /** Answers {@link RunContext#confirm}: returns where it is confirmed, else throws. */
  @FunctionalInterface
  public interface Confirmation {
    /** Confirms. */
    void confirm() throws InterruptedException;
  }

  private final Orders orders;
  private final RunContext context;

  private TestRun(Builder builder) {
    orders = new Orders(Clock.system(), new Orders.Trust(Session.NEVER));
    context = new RunContext(builder.assignment.build(), orders, builder.confirmation::confirm);
  }

  /** Returns what makes one. */
  public static Builder builder() {
    return new Builder();
  }

  /** What a handler is to be given. Every field has a default. */
  public static final class Builder {
    static final long SLOT = 1_791_633_610_000L; // 2026-10-10T12:00:10Z
    private final Assignment.Builder assignment =
        Assignment.newBuilder().setJob("job").setToken("test").setAttempt(1).setInstanceId("test");
    private Confirmation confirmation = () -> {};

    private Builder() {
      slot(SLOT);
      trigger(RunContext.Trigger.SCHEDULE);
    }

    /** The job's name. Default: "job". */
    public Builder job(String name) {
      assignment.setJob(name);
      return this;
    }

    /**
     * The slot, in milliseconds since 1970-01-01T00:00:00Z; the fence becomes the same in
     * microseconds. Default: a moment in 2026.
     */
    public Builder slot(long millis) {
      assignment.setSlot(millis).setFence(millis * 1_000);
      return this;
    }

    /** Which attempt it is. Default: 1. */
    public Builder attempt(int attempt) {
      assignment.setAttempt(attempt);
      return this;
    }

    /** Names the attempt. Default: "test". */
    public Builder token(String token) {
      assignment.setToken(token);
      return this;
    }

    /** The fence. Default: see {@link #slot}. */
    public Builder fence(long fence) {
      assignment.setFence(fence);
      return this;
    }

    /** The instance that holds the claim. Default: "test". */
    public Builder instanceId(String instanceId) {
      assignment.setInstanceId(instanceId);
      return this;
    }

    /** What caused the run. Default: the schedule. */
    public Builder trigger(RunContext.Trigger trigger) {
      assignment.setTriggerValue(trigger.wire());
      return this;
    }

    /** What was given with the trigger. Default: nothing. */
    public Builder payload(byte[] payload) {
      assignment.setPayload(ByteString.copyFrom(payload));
      return this;
    }

    /** As {@link #payload(byte[])}, a text in UTF-8. */
    public Builder payload(String payload) {
      return payload(payload.getBytes(StandardCharsets.UTF_8));
    }

    /** The attempt's timeout, counted from {@link #build}. Default: none. */
    public Builder timeout(Duration timeout) {
      Durations.check("timeout", timeout);
      assignment.setTimeout(Durations.toWire(timeout));
      return this;
    }

    /**
     * What {@link RunContext#confirm} does. Default: it succeeds. {@link TestRun#notConfirmed} is
     * what to throw where it is not to.
     */
    public Builder confirmation(Confirmation confirmation) {
      this.confirmation = confirmation;
      return this;
    }

    /** Returns the attempt. */
    public TestRun build() {
      return new TestRun(this);
    }
  }

  /** Returns what the sidecar's silence makes of {@link RunContext#confirm}. */
  public static AnarchonException.NotConfirmed notConfirmed(String message) {
    return new AnarchonException.NotConfirmed(message);
  }

  /** Returns what the handler is called with. */
  public RunContext context() {
    return context;
  }

  /**
   * Runs the handler in the calling thread, which {@link #cancel} in another one interrupts;
   * returns and throws what the handler does.
   */
  public Object call(Handler handler) throws Exception {
    orders.begin();
    try {
      return handler.run(context);
    } finally {
      orders.end();
    }
  }

  /**
   * Tells the attempt to stop; {@link CancelReason#LEASE_LOST} and {@link CancelReason#FENCED} end
   * its trust as well.
   */
  public void cancel(CancelReason reason) {
    orders.cancel(reason.wire(), "", !CancelReason.endsTrust(reason.wire()));
  }
}

package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** What an attempt is told, and the interrupts of its thread. */
class OrdersTest {
  private static final int REQUESTED = CancelReason.REQUESTED.wire();
  private static final int FENCED = CancelReason.FENCED.wire();
  private long now;
  private final Orders.Trust trust = new Orders.Trust(1_000);
  private final Orders orders = new Orders(() -> now, trust);

  @AfterEach
  void leavesNoInterrupt() {
    assertFalse(Thread.interrupted());
  }

  @Test
  void aCancellationInterruptsTheHandlersThreadAndNoLongerAfterItsEnd() {
    orders.begin();
    orders.cancel(REQUESTED, "", true);
    assertTrue(Thread.interrupted());
    orders.cancel(CancelReason.TIMEOUT.wire(), "", true);
    assertFalse(Thread.interrupted(), "told once");
    orders.end();
    orders.cancel(FENCED, "", false);
    assertFalse(Thread.interrupted(), "the thread is another one's now");
  }

  @Test
  void anInterruptThatTheHandlerDidNotTakeIsNotForTheNextOne() {
    orders.begin();
    orders.cancel(REQUESTED, "", true);
    orders.end();
    assertFalse(Thread.currentThread().isInterrupted());
  }

  @Test
  void whatWasToldBeforeTheHandlerBeganIsDeliveredToIt() {
    orders.cancel(REQUESTED, "", true);
    orders.begin();
    assertTrue(Thread.interrupted());
    orders.end();
  }

  @Test
  void theLossOfTheLeaseInterruptsOnceMore() {
    orders.begin();
    orders.cancel(REQUESTED, "in words", true);
    assertTrue(Thread.interrupted());
    orders.cancel(FENCED, "", false);
    assertTrue(Thread.currentThread().isInterrupted());
    CancelledException lost =
        assertThrows(CancelledException.LeaseLost.class, orders::check); // takes the interrupt
    assertFalse(Thread.currentThread().isInterrupted());
    assertSame(CancelReason.REQUESTED, lost.reason(), "the first one stays");
    assertEquals("REQUESTED: in words", lost.getMessage());
    orders.end();
  }

  @Test
  void aCheckInAnotherThreadLeavesInterruptsAlone() {
    orders.cancel(REQUESTED, "", true); // no handler has begun
    Thread.currentThread().interrupt();
    assertThrows(CancelledException.class, orders::check);
    assertTrue(Thread.interrupted());
  }

  @Test
  void trustThatIsOverByTheClockStaysOverForTheAttempt() {
    now = 999;
    orders.check();
    now = 1_000;
    assertThrows(CancelledException.LeaseLost.class, orders::check);
    trust.set(5_000);
    assertThrows(CancelledException.LeaseLost.class, orders::check);
  }

  @Test
  void aSleepEndsWithACancellationAndThrowsItsReason() throws Exception {
    TestRun run = TestRun.builder().build();
    Thread other = new Thread(() -> run.cancel(CancelReason.REQUESTED));
    run.call(
        context -> {
          other.start();
          CancelledException told =
              assertThrows(CancelledException.class, () -> context.sleep(Duration.ofHours(1)));
          other.join(); // may be waited for: no interrupt is left
          assertFalse(told instanceof CancelledException.LeaseLost);
          assertThrows(CancelledException.class, () -> context.sleep("1h"), "told before");
          return null;
        });
  }

  @Test
  void anInterruptOfSomebodyElsesEndsASleepAsJavaHasIt() throws Exception {
    TestRun run = TestRun.builder().build();
    run.call(
        context -> {
          Thread.currentThread().interrupt();
          return assertThrows(InterruptedException.class, () -> context.sleep("1h"));
        });
  }
}

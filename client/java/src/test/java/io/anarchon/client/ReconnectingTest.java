package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;

import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ConnectivityState;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

class ReconnectingTest {
  /** A channel of which only the state counts. */
  private static final class Stateful extends ManagedChannel {
    ConnectivityState state = ConnectivityState.IDLE;
    Runnable onChange;
    int resets;

    void become(ConnectivityState next) {
      state = next;
      Runnable told = onChange;
      onChange = null;
      told.run();
    }

    @Override
    public ConnectivityState getState(boolean requestConnection) {
      return state;
    }

    @Override
    public void notifyWhenStateChanged(ConnectivityState source, Runnable callback) {
      onChange = callback;
    }

    @Override
    public void resetConnectBackoff() {
      resets++;
    }

    @Override
    public ManagedChannel shutdown() {
      throw new UnsupportedOperationException();
    }

    @Override
    public boolean isShutdown() {
      return false;
    }

    @Override
    public boolean isTerminated() {
      return false;
    }

    @Override
    public ManagedChannel shutdownNow() {
      throw new UnsupportedOperationException();
    }

    @Override
    public boolean awaitTermination(long timeout, TimeUnit unit) {
      throw new UnsupportedOperationException();
    }

    @Override
    public <A, B> ClientCall<A, B> newCall(MethodDescriptor<A, B> method, CallOptions options) {
      throw new UnsupportedOperationException();
    }

    @Override
    public String authority() {
      return "";
    }
  }

  private final Stateful channel = new Stateful();
  private final List<Long> pauses = new ArrayList<>();
  private Runnable next;
  private int failures;

  private void watch() {
    new Reconnecting(
            channel,
            () -> 0.5,
            (millis, task) -> {
              pauses.add(millis);
              next = task;
            },
            () -> failures++)
        .watch();
  }

  @Test
  void aSidecarThatIsNotThereIsTriedAfterPausesOf100MsTo5s() {
    watch();
    channel.become(ConnectivityState.CONNECTING);
    channel.become(ConnectivityState.TRANSIENT_FAILURE);
    for (int tries = 1; tries <= 8; tries++) {
      assertEquals(tries - 1, channel.resets);
      next.run(); // the channel stays in TRANSIENT_FAILURE
    }
    assertEquals(List.of(75L, 150L, 300L, 600L, 1_200L, 2_400L, 3_750L, 3_750L, 3_750L), pauses);
    assertEquals(9, failures);
  }

  @Test
  void thePausesBeginAnewAfterAConnection() {
    watch();
    channel.become(ConnectivityState.TRANSIENT_FAILURE);
    next.run();
    channel.state = ConnectivityState.READY;
    next.run();
    channel.become(ConnectivityState.IDLE);
    channel.become(ConnectivityState.TRANSIENT_FAILURE);
    assertEquals(List.of(75L, 150L, 75L), pauses);
  }

  @Test
  void aChannelThatIsShutDownIsLeftAlone() {
    watch();
    channel.become(ConnectivityState.TRANSIENT_FAILURE);
    channel.state = ConnectivityState.SHUTDOWN;
    next.run();
    assertNull(channel.onChange);
    assertEquals(1, pauses.size());
  }
}

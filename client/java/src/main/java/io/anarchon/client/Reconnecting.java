package io.anarchon.client;

import io.grpc.ConnectivityState;
import io.grpc.ManagedChannel;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.DoubleSupplier;

/**
 * Has a channel look for its sidecar by the specification's back-off.
 *
 * <p>gRPC's own pauses between tries grow to two minutes, and cannot be set: each is cut short
 * here. A channel stays in TRANSIENT_FAILURE over several tries, so that it is time that moves this
 * on, and not its state.
 */
final class Reconnecting {
  /** Does something later. */
  interface Later {
    void run(long millis, Runnable task);
  }

  private final ManagedChannel channel;
  private final DoubleSupplier random;
  private final Later later;
  private final Runnable onFailure;
  private int failures; // what writes it comes one after the other

  /** Random draws from [0, 1); onFailure hears of every pause. */
  Reconnecting(ManagedChannel channel, DoubleSupplier random, Later later, Runnable onFailure) {
    this.channel = channel;
    this.random = random;
    this.later = later;
    this.onFailure = onFailure;
  }

  /** Later in a thread of Java's own. What is done there waits for nothing. */
  static void later(long millis, Runnable task) {
    CompletableFuture.delayedExecutor(millis, TimeUnit.MILLISECONDS, Runnable::run).execute(task);
  }

  /** Looks after the channel until it is shut down. */
  synchronized void watch() {
    ConnectivityState state = channel.getState(false);
    if (state == ConnectivityState.TRANSIENT_FAILURE) {
      onFailure.run();
      later.run(Session.backoff(failures++, random.getAsDouble()), this::again);
    } else if (state != ConnectivityState.SHUTDOWN) {
      if (state == ConnectivityState.READY) {
        failures = 0;
      }
      channel.notifyWhenStateChanged(state, this::watch);
    }
  }

  private void again() {
    channel.resetConnectBackoff();
    watch();
  }
}

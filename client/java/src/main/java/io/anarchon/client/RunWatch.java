package io.anarchon.client;

import io.anarchon.v1.AdminServiceGrpc;
import io.anarchon.v1.Run;
import io.anarchon.v1.WatchRunsRequest;
import io.anarchon.v1.WatchRunsResponse;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Supplier;

/**
 * The runs that {@link AdminClient#watchRuns} watches, as they change. To be gone through once, in
 * one thread: every iterator goes on where the one before was.
 *
 * <p>Going on blocks until a run changes, and throws what the methods of {@link AdminClient} throw:
 * {@link AnarchonException.Unavailable} where the sidecar stops, where its store has been away for
 * a minute, and where the thread is interrupted, which it stays then. {@link #close}, in any
 * thread, ends it.
 */
public final class RunWatch implements Iterable<Run>, AutoCloseable {
  private final Endpoint endpoint;
  private final ClientCall<WatchRunsRequest, WatchRunsResponse> call;
  private final CompletableFuture<Void> begun = new CompletableFuture<>();

  /**
   * What has come, to be looked at by who goes through the runs: a run, and at the end null or an
   * error. One run at a time: the next is asked for when it has been taken.
   */
  private final BlockingQueue<Supplier<Run>> arrived = new LinkedBlockingQueue<>();

  private final Runs runs = new Runs();
  private volatile boolean isClosed;

  private RunWatch(Endpoint endpoint, Channel channel) {
    this.endpoint = endpoint;
    call = channel.newCall(AdminServiceGrpc.getWatchRunsMethod(), CallOptions.DEFAULT);
  }

  /** Returns a watch that has begun; throws where that does not come about in time. */
  static RunWatch begin(
      Endpoint endpoint, Channel channel, WatchRunsRequest request, long timeoutMs) {
    RunWatch watch = new RunWatch(endpoint, channel);
    watch.call.start(watch.new Arrivals(), new Metadata());
    watch.call.request(1);
    watch.call.sendMessage(request);
    watch.call.halfClose();
    try {
      watch.begun.get(timeoutMs, TimeUnit.MILLISECONDS);
      return watch;
    } catch (ExecutionException refused) {
      throw endpoint.error(refused.getCause());
    } catch (TimeoutException late) {
      watch.close();
      throw new AnarchonException.Unavailable(
          "the sidecar at "
              + endpoint.address
              + " did not begin to watch within "
              + timeoutMs / 1e3
              + " s",
          "");
    } catch (InterruptedException interrupt) {
      watch.close();
      throw interrupted();
    }
  }

  /** Watches no longer: going through the runs ends. */
  @Override
  public void close() {
    isClosed = true;
    call.cancel("nobody watches any more", null);
  }

  /** Returns what goes through the runs. */
  @Override
  public Iterator<Run> iterator() {
    return runs;
  }

  private static AnarchonException.Unavailable interrupted() {
    Thread.currentThread().interrupt();
    return new AnarchonException.Unavailable("interrupted while watching runs", "");
  }

  private final class Arrivals extends ClientCall.Listener<WatchRunsResponse> {
    @Override
    public void onHeaders(Metadata headers) {
      begun.complete(null);
    }

    @Override
    public void onMessage(WatchRunsResponse change) {
      arrived.add(change::getRun);
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      if (!status.isOk()) {
        begun.completeExceptionally(status.asRuntimeException(trailers));
      }
      begun.complete(null);
      arrived.add(
          () -> {
            if (status.isOk() || isClosed) {
              return null;
            }
            throw endpoint.error(status.asRuntimeException(trailers));
          });
    }
  }

  private final class Runs implements Iterator<Run> {
    private Run next;
    private boolean isOver;

    @Override
    public boolean hasNext() {
      if (next == null && !isOver && !isClosed) {
        isOver = true; // unless a run comes
        next = take();
        isOver = next == null;
      }
      return next != null && !isClosed;
    }

    private Run take() {
      try {
        Run run = arrived.take().get();
        call.request(1);
        return run;
      } catch (InterruptedException interrupt) {
        close();
        throw interrupted();
      }
    }

    @Override
    public Run next() {
      if (!hasNext()) {
        throw new NoSuchElementException();
      }
      Run run = next;
      next = null;
      return run;
    }
  }
}

package io.anarchon.client;

import com.google.protobuf.ByteString;
import io.anarchon.v1.Assignment;
import io.anarchon.v1.Assignments;
import io.anarchon.v1.Attached;
import io.anarchon.v1.Cancellation;
import io.anarchon.v1.CloseSessionRequest;
import io.anarchon.v1.CloseSessionResponse;
import io.anarchon.v1.CompleteRequest;
import io.anarchon.v1.CompleteResponse;
import io.anarchon.v1.KeepAliveRequest;
import io.anarchon.v1.KeepAliveResponse;
import io.anarchon.v1.Outcome;
import io.anarchon.v1.Receipt;
import io.anarchon.v1.ReceiptStatus;
import io.anarchon.v1.Result;
import io.anarchon.v1.SubscribeRequest;
import io.anarchon.v1.SubscribeResponse;
import io.anarchon.v1.Trigger;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.BooleanSupplier;

/**
 * Stands in for a sidecar in tests: give it to a client by {@link
 * AnarchonClient.Builder#fakeSidecar}. It attaches, hands out what the test says, answers
 * keep-alives, records results, and shows what it was sent. Safe to use in any thread; for one
 * client with one subscription.
 */
public final class FakeSidecar {
  private static final long SLOT = TestRun.Builder.SLOT;
  private static final Duration PATIENCE = Duration.ofSeconds(30);
  private static final Duration TTL = Duration.ofSeconds(15);
  private static final Duration KEEP_ALIVE = Duration.ofSeconds(5);
  private boolean isAway;
  private Transport.Events stream;
  private SubscribeRequest waiting;
  private Transport.Events waitingEvents;
  private int runs;
  private final Set<String> owned = new HashSet<>();
  private final List<SubscribeRequest> subscribes = new ArrayList<>();
  private final List<KeepAliveRequest> keepAlives = new ArrayList<>();
  private final Map<String, Outcome> outcomes = new HashMap<>();
  private CloseSessionRequest closed;

  /**
   * Hands out a run of the job with the payload, as soon as the client is attached; returns its
   * token. Waits at most 30 s, and throws IllegalStateException after that.
   */
  public synchronized String assign(String job, String payload) {
    await("the client to be attached", () -> stream != null && !keepAlives.isEmpty());
    runs++;
    String token = "run-" + runs;
    owned.add(token);
    Assignment assignment =
        Assignment.newBuilder()
            .setToken(token)
            .setJob(job)
            .setSlot(SLOT + runs * 1_000L)
            .setAttempt(1)
            .setFence((SLOT + runs * 1_000L) * 1_000)
            .setTrigger(Trigger.TRIGGER_MANUAL)
            .setInstanceId("fake")
            .setPayload(ByteString.copyFromUtf8(payload))
            .build();
    stream.event(
        SubscribeResponse.newBuilder()
            .setRuns(Assignments.newBuilder().addAssignments(assignment))
            .build());
    return token;
  }

  /** Tells the client to stop an attempt. */
  public synchronized void cancel(String token, CancelReason reason) {
    await("the client to be attached", () -> stream != null);
    Cancellation cancellation =
        Cancellation.newBuilder().setToken(token).setReasonValue(reason.wire()).build();
    stream.event(SubscribeResponse.newBuilder().setCancel(cancellation).build());
  }

  /** Makes the sidecar no longer own an attempt: the next answer to a keep-alive says so. */
  public synchronized void lose(String token) {
    owned.remove(token);
  }

  /** Ends the client's stream; the client subscribes again. */
  public synchronized void breakStream() {
    if (stream != null) {
      Transport.Events broken = stream;
      stream = null;
      broken.ended(new AnarchonException.Unavailable("the stream is broken", ""));
    }
    notifyAll();
  }

  /** Makes the sidecar unavailable until {@link #comeBack}. */
  public synchronized void goAway() {
    isAway = true;
    breakStream();
  }

  /** Ends {@link #goAway}. */
  public synchronized void comeBack() {
    isAway = false;
    if (waiting != null) {
      attach(waiting, waitingEvents);
    }
  }

  /** Waits, at most 30 s, for how an attempt ended. */
  public synchronized Outcome outcome(String token) {
    await("the outcome of " + token, () -> outcomes.containsKey(token));
    return outcomes.get(token);
  }

  /** Waits, at most 30 s, until the client has subscribed this often; returns the requests. */
  public synchronized List<SubscribeRequest> subscribes(int count) {
    await("the client to subscribe", () -> subscribes.size() >= count);
    return List.copyOf(subscribes);
  }

  /** Waits, at most 30 s, for so many keep-alives; returns the requests. */
  public synchronized List<KeepAliveRequest> keepAlives(int count) {
    await("a keep-alive", () -> keepAlives.size() >= count);
    return List.copyOf(keepAlives);
  }

  /** Returns the request that closed the session; null: none yet. */
  public synchronized CloseSessionRequest closed() {
    return closed;
  }

  private void await(String what, BooleanSupplier holds) {
    long end = System.nanoTime() + PATIENCE.toNanos();
    while (!holds.getAsBoolean()) {
      long left = (end - System.nanoTime()) / 1_000_000;
      if (left <= 0) {
        throw new IllegalStateException("waited in vain for " + what);
      }
      try {
        wait(left);
      } catch (InterruptedException error) {
        Thread.currentThread().interrupt();
        throw new IllegalStateException("interrupted while waiting for " + what, error);
      }
    }
  }

  private void attach(SubscribeRequest request, Transport.Events events) {
    waiting = null;
    waitingEvents = null;
    subscribes.add(request);
    stream = events;
    events.event(
        SubscribeResponse.newBuilder()
            .setAttached(
                Attached.newBuilder()
                    .setInstanceId("fake")
                    .setKeepAliveInterval(Durations.toWire(KEEP_ALIVE))
                    .setSessionTtl(Durations.toWire(TTL))
                    .addAllLost(lostOf(request.getInFlightList())))
            .build());
    notifyAll();
  }

  private List<Cancellation> lostOf(List<String> tokens) {
    List<Cancellation> lost = new ArrayList<>();
    for (String token : tokens) {
      if (!owned.contains(token) && !outcomes.containsKey(token)) {
        lost.add(
            Cancellation.newBuilder()
                .setToken(token)
                .setReasonValue(CancelReason.FENCED.wire())
                .build());
      }
    }
    return lost;
  }

  Transport transport() {
    return new Calls();
  }

  /** The fake as the client calls it. */
  private final class Calls implements Transport {
    private AnarchonException.Unavailable away() {
      return new AnarchonException.Unavailable("the sidecar is away", "");
    }

    @Override
    public Runnable subscribe(SubscribeRequest request, Events events) {
      synchronized (FakeSidecar.this) {
        if (isAway) {
          waiting = request;
          waitingEvents = events;
        } else {
          attach(request, events);
        }
      }
      return () -> {
        synchronized (FakeSidecar.this) {
          if (stream == events) {
            stream = null;
          }
          if (waitingEvents == events) {
            waiting = null;
            waitingEvents = null;
          }
        }
      };
    }

    @Override
    public void keepAlive(
        KeepAliveRequest request, long timeout, Answer<KeepAliveResponse> answer) {
      synchronized (FakeSidecar.this) {
        if (isAway) {
          answer.failed(away());
          return;
        }
        keepAlives.add(request);
        KeepAliveResponse.Builder response =
            KeepAliveResponse.newBuilder()
                .setSessionTtl(Durations.toWire(TTL))
                .setStreamOpen(stream != null)
                .addAllLost(lostOf(request.getInFlightList()));
        request.getConfirmList().stream().filter(owned::contains).forEach(response::addConfirmed);
        answer.answered(response.build());
        FakeSidecar.this.notifyAll();
      }
    }

    @Override
    public void complete(CompleteRequest request, long timeout, Answer<CompleteResponse> answer) {
      synchronized (FakeSidecar.this) {
        if (isAway) {
          answer.failed(away());
          return;
        }
        CompleteResponse.Builder response = CompleteResponse.newBuilder();
        for (Result result : request.getResultsList()) {
          ReceiptStatus status =
              owned.contains(result.getToken())
                  ? ReceiptStatus.RECEIPT_STATUS_RECORDED
                  : ReceiptStatus.RECEIPT_STATUS_FENCED;
          outcomes.put(result.getToken(), result.getOutcome());
          response.addReceipts(Receipt.newBuilder().setStatus(status));
        }
        answer.answered(response.build());
        FakeSidecar.this.notifyAll();
      }
    }

    @Override
    public void closeSession(
        CloseSessionRequest request, long timeout, Answer<CloseSessionResponse> answer) {
      synchronized (FakeSidecar.this) {
        if (isAway) {
          answer.failed(away());
          return;
        }
        closed = request;
        answer.answered(CloseSessionResponse.getDefaultInstance());
        FakeSidecar.this.notifyAll();
      }
    }

    @Override
    public void close() {}
  }
}

package io.anarchon.client;

import io.anarchon.v1.CloseSessionRequest;
import io.anarchon.v1.CloseSessionResponse;
import io.anarchon.v1.CompleteRequest;
import io.anarchon.v1.CompleteResponse;
import io.anarchon.v1.KeepAliveRequest;
import io.anarchon.v1.KeepAliveResponse;
import io.anarchon.v1.SessionServiceGrpc;
import io.anarchon.v1.SubscribeRequest;
import io.anarchon.v1.SubscribeResponse;
import io.grpc.ConnectivityState;
import io.grpc.Context;
import io.grpc.stub.StreamObserver;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** The calls over one gRPC channel. */
final class GrpcTransport implements Transport {
  private static final Logger LOG = LoggerFactory.getLogger("anarchon");
  private final Endpoint endpoint;
  private final Endpoint.Connection connection;
  private final SessionServiceGrpc.SessionServiceStub stub;
  private final AtomicBoolean wasReached = new AtomicBoolean();

  GrpcTransport(Endpoint endpoint) {
    this.endpoint = endpoint;
    connection = endpoint.connect();
    stub = SessionServiceGrpc.newStub(connection.channel());
  }

  @Override
  public Runnable subscribe(SubscribeRequest request, Events events) {
    AnarchonException.Sidecar refused = refused();
    if (refused != null) {
      events.ended(refused);
      return () -> {};
    }
    sayOnceThatThereIsNone();
    Context.CancellableContext context = Context.ROOT.withCancellation();
    Context before = context.attach();
    try {
      stub.withWaitForReady()
          .subscribe(
              request,
              new StreamObserver<>() {
                @Override
                public void onNext(SubscribeResponse event) {
                  wasReached.set(true);
                  events.event(event);
                }

                @Override
                public void onError(Throwable error) {
                  events.ended(endpoint.error(error));
                }

                @Override
                public void onCompleted() {
                  events.ended(
                      new AnarchonException.Unavailable("the sidecar ended the stream", ""));
                }
              });
    } finally {
      context.detach(before);
    }
    return () -> context.cancel(null);
  }

  /** Says once that there is no sidecar yet; later losses are the session's to report. */
  private void sayOnceThatThereIsNone() {
    if (wasReached.get()) {
      return;
    }
    ConnectivityState state = connection.channel().getState(true);
    connection
        .channel()
        .notifyWhenStateChanged(
            state,
            () -> {
              if (connection.channel().getState(false) == ConnectivityState.TRANSIENT_FAILURE) {
                if (wasReached.compareAndSet(false, true)) {
                  LOG.warn("{}; trying again until one answers", endpoint.absence());
                }
              } else if (connection.channel().getState(false) == ConnectivityState.CONNECTING) {
                sayOnceThatThereIsNone();
              }
            });
  }

  @Override
  public void keepAlive(KeepAliveRequest request, long timeout, Answer<KeepAliveResponse> answer) {
    AnarchonException.Sidecar refused = refused();
    if (refused != null) {
      answer.failed(refused);
      return;
    }
    stub.withDeadlineAfter(timeout, TimeUnit.MILLISECONDS).keepAlive(request, one(answer));
  }

  @Override
  public void complete(CompleteRequest request, long timeout, Answer<CompleteResponse> answer) {
    AnarchonException.Sidecar refused = refused();
    if (refused != null) {
      answer.failed(refused);
      return;
    }
    stub.withWaitForReady()
        .withDeadlineAfter(timeout, TimeUnit.MILLISECONDS)
        .complete(request, one(answer));
  }

  @Override
  public void closeSession(
      CloseSessionRequest request, long timeout, Answer<CloseSessionResponse> answer) {
    AnarchonException.Sidecar refused = refused();
    if (refused != null) {
      answer.failed(refused);
      return;
    }
    stub.withDeadlineAfter(timeout, TimeUnit.MILLISECONDS).closeSession(request, one(answer));
  }

  @Override
  public void close() {
    connection.close();
  }

  /** A socket that may be somebody else's is not called. */
  private AnarchonException.Sidecar refused() {
    try {
      endpoint.checkSocket();
      return null;
    } catch (AnarchonException.WrongSetup error) {
      return new AnarchonException.Unavailable(error.getMessage(), "");
    }
  }

  private <T> StreamObserver<T> one(Answer<T> answer) {
    return new StreamObserver<>() {
      private T response;

      @Override
      public void onNext(T value) {
        response = value;
      }

      @Override
      public void onError(Throwable error) {
        answer.failed(endpoint.error(error));
      }

      @Override
      public void onCompleted() {
        answer.answered(response);
      }
    };
  }
}

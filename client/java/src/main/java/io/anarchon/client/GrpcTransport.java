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
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.stub.StreamObserver;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.DoubleSupplier;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** The calls over one gRPC channel. */
final class GrpcTransport implements Transport {
  private static final Logger LOG = LoggerFactory.getLogger("anarchon");
  private final Endpoint endpoint;
  private final Endpoint.Connection connection;
  private final SessionServiceGrpc.SessionServiceStub stub;
  private final AtomicBoolean wasReached = new AtomicBoolean();

  /** Random draws from [0, 1). */
  GrpcTransport(Endpoint endpoint, DoubleSupplier random) {
    this.endpoint = endpoint;
    connection = endpoint.connect();
    ManagedChannel channel = connection.channel();
    stub = SessionServiceGrpc.newStub(channel);
    new Reconnecting(channel, random, Reconnecting::later, this::sayOnceThatThereIsNone).watch();
  }

  @Override
  public Runnable subscribe(SubscribeRequest request, Events events) {
    AnarchonException.Sidecar refused = endpoint.strangeSocket();
    if (refused != null) {
      events.ended(refused);
      return () -> {};
    }
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

  /** Later losses are the session's to report. */
  private void sayOnceThatThereIsNone() {
    if (wasReached.compareAndSet(false, true)) {
      LOG.warn("{}; trying again until one answers", endpoint.absence());
    }
  }

  @Override
  public void keepAlive(KeepAliveRequest request, long timeout, Answer<KeepAliveResponse> answer) {
    AnarchonException.Sidecar refused = endpoint.strangeSocket();
    if (refused != null) {
      answer.failed(refused);
      return;
    }
    stub.withDeadlineAfter(timeout, TimeUnit.MILLISECONDS).keepAlive(request, one(answer));
  }

  @Override
  public void complete(CompleteRequest request, long timeout, Answer<CompleteResponse> answer) {
    AnarchonException.Sidecar refused = endpoint.strangeSocket();
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
    AnarchonException.Sidecar refused = endpoint.strangeSocket();
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

package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import io.anarchon.v1.AdminServiceGrpc;
import io.anarchon.v1.CancelRunRequest;
import io.anarchon.v1.CancelRunResponse;
import io.anarchon.v1.GetInstanceRequest;
import io.anarchon.v1.GetInstanceResponse;
import io.anarchon.v1.GetJobRequest;
import io.anarchon.v1.GetJobResponse;
import io.anarchon.v1.JobSpec;
import io.anarchon.v1.ListRunsRequest;
import io.anarchon.v1.ListRunsResponse;
import io.anarchon.v1.PreviewSlotsRequest;
import io.anarchon.v1.PreviewSlotsResponse;
import io.anarchon.v1.Run;
import io.anarchon.v1.TriggerRunRequest;
import io.anarchon.v1.TriggerRunResponse;
import io.anarchon.v1.WatchRunsRequest;
import io.anarchon.v1.WatchRunsResponse;
import io.grpc.ForwardingServerCall;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.stub.ServerCallStreamObserver;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Admin calls, over a connection. */
@Timeout(60)
class AdminClientTest {
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> REASON =
      Metadata.Key.of("anarchon-reason", Metadata.ASCII_STRING_MARSHALLER);

  private static final Metadata.Key<String> SCOPE =
      Metadata.Key.of("anarchon-scope", Metadata.ASCII_STRING_MARSHALLER);

  private final List<Object> asked = new CopyOnWriteArrayList<>();
  private final List<String> authorizations = new CopyOnWriteArrayList<>();
  private final CountDownLatch watchEnded = new CountDownLatch(1);
  private Server server;
  private AdminClient admin;

  /** A sidecar that has two pages of runs, two changes of runs, and no job. */
  private final class Answers extends AdminServiceGrpc.AdminServiceImplBase {
    private <T> void answer(Object request, T response, StreamObserver<T> observer) {
      asked.add(request);
      observer.onNext(response);
      observer.onCompleted();
    }

    @Override
    public void listRuns(ListRunsRequest request, StreamObserver<ListRunsResponse> observer) {
      boolean isFirst = request.getPageToken().isEmpty();
      ListRunsResponse.Builder page = ListRunsResponse.newBuilder();
      for (int n = 0; n < 2; n++) {
        page.addRuns(Run.newBuilder().setSlot(n + (isFirst ? 0 : 2)));
      }
      answer(request, page.setNextPageToken(isFirst ? "more" : "").build(), observer);
    }

    @Override
    public void getJob(GetJobRequest request, StreamObserver<GetJobResponse> observer) {
      Metadata trailers = new Metadata();
      trailers.put(REASON, "JOB_NOT_FOUND");
      observer.onError(
          Status.NOT_FOUND.withDescription("no such job").asRuntimeException(trailers));
    }

    @Override
    public void getInstance(
        GetInstanceRequest request, StreamObserver<GetInstanceResponse> observer) {
      answer(request, GetInstanceResponse.getDefaultInstance(), observer);
    }

    @Override
    public void triggerRun(TriggerRunRequest request, StreamObserver<TriggerRunResponse> observer) {
      Run run = Run.newBuilder().setJob(request.getJob()).build();
      answer(request, TriggerRunResponse.newBuilder().setRun(run).build(), observer);
    }

    @Override
    public void cancelRun(CancelRunRequest request, StreamObserver<CancelRunResponse> observer) {
      Run run = Run.newBuilder().setCancelMessage(request.getReason()).build();
      answer(request, CancelRunResponse.newBuilder().setRun(run).build(), observer);
    }

    @Override
    public void watchRuns(WatchRunsRequest request, StreamObserver<WatchRunsResponse> observer) {
      asked.add(request);
      ((ServerCallStreamObserver<WatchRunsResponse>) observer)
          .setOnCancelHandler(watchEnded::countDown);
      if (request.getJob().equals("slow")) {
        return;
      }
      if (request.getJob().equals("nowhere")) {
        observer.onError(unavailable("STORE_UNAVAILABLE", "the store does not answer now"));
        return;
      }
      for (int slot = 1; slot <= 2; slot++) {
        Run run = Run.newBuilder().setSlot(slot).build();
        observer.onNext(WatchRunsResponse.newBuilder().setRun(run).build());
      }
      if (request.getJob().equals("stopping")) {
        observer.onError(unavailable("DRAINING", "the sidecar is going away"));
      }
    }

    private RuntimeException unavailable(String reason, String message) {
      Metadata trailers = new Metadata();
      trailers.put(REASON, reason);
      return Status.UNAVAILABLE.withDescription(message).asRuntimeException(trailers);
    }

    @Override
    public void previewSlots(
        PreviewSlotsRequest request, StreamObserver<PreviewSlotsResponse> observer) {
      answer(request, PreviewSlotsResponse.newBuilder().addSlots(7).build(), observer);
    }
  }

  private final class Listener implements ServerInterceptor {
    @Override
    public <A, B> ServerCall.Listener<A> interceptCall(
        ServerCall<A, B> call, Metadata headers, ServerCallHandler<A, B> next) {
      authorizations.add(headers.get(AUTHORIZATION));
      boolean isGetInstance =
          call.getMethodDescriptor() == (Object) AdminServiceGrpc.getGetInstanceMethod();
      return next.startCall(isGetInstance && asked.isEmpty() ? covering(call) : call, headers);
    }
  }

  /** What an answer that is an instance's own says of itself. */
  private static <A, B> ServerCall<A, B> covering(ServerCall<A, B> call) {
    return new ForwardingServerCall.SimpleForwardingServerCall<>(call) {
      @Override
      public void close(Status status, Metadata trailers) {
        trailers.put(SCOPE, "instance=an%20swering:1");
        super.close(status, trailers);
      }
    };
  }

  @BeforeEach
  void start(@TempDir Path directory) throws IOException {
    server =
        NettyServerBuilder.forAddress(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0))
            .addService(new Answers())
            .intercept(new Listener())
            .build()
            .start();
    Path file = directory.resolve("token");
    Files.writeString(file, "secret\n");
    admin =
        AdminClient.builder()
            .address("127.0.0.1:" + server.getPort())
            .tokenFile(file.toString())
            .build();
  }

  @AfterEach
  void stop() {
    admin.close();
    server.shutdownNow();
  }

  @Test
  void listsGoThroughAllPagesAsTheyAreNeeded() {
    List<Long> slots = new ArrayList<>();
    for (Run run : admin.listRuns(ListRunsRequest.newBuilder().setJob("job").build())) {
      slots.add(run.getSlot());
      assertEquals(slots.size() <= 2 ? 1 : 2, asked.size(), "pages fetched");
    }
    assertEquals(List.of(0L, 1L, 2L, 3L), slots);
    ListRunsRequest first = (ListRunsRequest) asked.get(0);
    assertEquals("job", first.getJob());
    assertEquals(500, first.getPageSize());
    assertEquals("more", ((ListRunsRequest) asked.get(1)).getPageToken());
    assertEquals(List.of("Bearer secret", "Bearer secret"), authorizations);
  }

  @Test
  void anErrorIsTheKindThatItsReasonSays() {
    AnarchonException.NotFound error =
        assertThrows(AnarchonException.NotFound.class, () -> admin.getJob("job"));
    assertEquals("no such job", error.getMessage());
    assertEquals("JOB_NOT_FOUND", error.reason());
    assertThrows(AnarchonException.Version.class, () -> admin.resumeJob("job")); // unimplemented
  }

  @Test
  void whatTheLastAnswerCoversIsKept() {
    admin.getInstance("");
    assertEquals("instance=an swering:1", admin.scope());
    admin.getInstance("other");
    assertEquals("", admin.scope());
  }

  @Test
  void aTriggerDrawsARequestIdWhereNoneIsGiven() {
    assertEquals("job", admin.triggerRun("job", new byte[] {1}).getJob());
    admin.triggerRun("job", new byte[0], "mine");
    TriggerRunRequest first = (TriggerRunRequest) asked.get(0);
    assertFalse(first.getRequestId().isEmpty());
    assertEquals(ByteString.copyFrom(new byte[] {1}), first.getPayload());
    assertEquals("mine", ((TriggerRunRequest) asked.get(1)).getRequestId());
  }

  @Test
  void aCancelledRunKeepsTheReasonGiven() {
    assertEquals("not today", admin.cancelRun("job", 5, "not today").getCancelMessage());
  }

  @Test
  void whatIsTooLongIsNamedAndNotSent() {
    isTooLong(
        "payload of 65537 bytes: must be at most 65536 bytes",
        () -> admin.triggerRun("job", new byte[65_537]));
    isTooLong(
        "requestId of 130 bytes: must be at most 128 bytes",
        () -> admin.triggerRun("job", new byte[0], "é".repeat(65)));
    isTooLong(
        "reason of 1025 bytes: must be at most 1024 bytes",
        () -> admin.pauseJob("job", "x".repeat(1_025)));
    isTooLong(
        "reason of 9000 bytes: must be at most 1024 bytes",
        () -> admin.cancelRun("job", 1, "x".repeat(9_000)));
    String longName = "x".repeat(5_000_000);
    isTooLong(
        "request of 5000005 bytes: must be at most 4194304 bytes", () -> admin.getJob(longName));
    WatchRunsRequest longRequest = WatchRunsRequest.newBuilder().setJob(longName).build();
    isTooLong(
        "request of 5000005 bytes: must be at most 4194304 bytes",
        () -> admin.watchRuns(longRequest));
    assertEquals(List.of(), asked);
  }

  private static void isTooLong(String message, org.junit.jupiter.api.function.Executable call) {
    assertEquals(message, assertThrows(AnarchonException.WrongSetup.class, call).getMessage());
  }

  // ── Watching ─────────────────────────────────────────────────────────────────────────────────

  private static WatchRunsRequest of(String job) {
    return WatchRunsRequest.newBuilder().setJob(job).setFromSlot(1).setUntilSlot(9).build();
  }

  @Test
  void watchedRunsComeAsTheyChangeUntilTheWatchIsClosed() throws InterruptedException {
    List<Long> slots = new ArrayList<>();
    RunWatch watch = admin.watchRuns(of("job"));
    for (Run run : watch) {
      slots.add(run.getSlot());
      if (slots.size() == 2) {
        watch.close();
      }
    }
    assertEquals(List.of(1L, 2L), slots);
    assertEquals(List.of(of("job")), asked);
    assertEquals(List.of("Bearer secret"), authorizations);
    assertTrue(watchEnded.await(30, TimeUnit.SECONDS), "the sidecar is told");
  }

  @Test
  void aWatchThatIsClosedEndsForWhoeverWaitsForIt() throws InterruptedException {
    RunWatch watch = admin.watchRuns(of("job"));
    Iterator<Run> runs = watch.iterator();
    runs.next();
    runs.next();
    Thread closes = new Thread(watch::close);
    closes.start();
    assertFalse(runs.hasNext());
    closes.join();
  }

  @Test
  void aThreadThatIsInterruptedWatchesNoLonger() throws InterruptedException {
    Iterator<Run> runs = admin.watchRuns(of("job")).iterator();
    runs.next();
    runs.next();
    Thread.currentThread().interrupt();
    assertThrows(AnarchonException.Unavailable.class, runs::hasNext);
    assertTrue(Thread.interrupted());
    assertTrue(watchEnded.await(30, TimeUnit.SECONDS), "the sidecar is told");
    assertFalse(runs.hasNext());
  }

  @Test
  void aWatchThatTheSidecarEndsGivesWhatCameAndSaysWhy() {
    List<Long> slots = new ArrayList<>();
    try (RunWatch watch = admin.watchRuns(of("stopping"))) {
      AnarchonException.Unavailable ended =
          assertThrows(
              AnarchonException.Unavailable.class,
              () -> watch.forEach(run -> slots.add(run.getSlot())));
      assertEquals("DRAINING", ended.reason());
      assertEquals("the sidecar is going away", ended.getMessage());
      assertFalse(watch.iterator().hasNext());
    }
    assertEquals(List.of(1L, 2L), slots);
  }

  @Test
  void aWatchThatCannotBeginIsRefusedAtOnce() throws InterruptedException {
    AnarchonException.Unavailable refused =
        assertThrows(AnarchonException.Unavailable.class, () -> admin.watchRuns(of("nowhere")));
    assertEquals("the store does not answer now", refused.getMessage());
    AnarchonException.Unavailable late =
        assertThrows(AnarchonException.Unavailable.class, () -> admin.watchRuns(of("slow"), 100));
    assertTrue(late.getMessage().endsWith("did not begin to watch within 0.1 s"), late::getMessage);
    assertTrue(watchEnded.await(30, TimeUnit.SECONDS), "the sidecar is told");
  }

  @Test
  void slotsArePreviewedOfAJobByNameOrByCode() {
    Job job = Job.every("job", "1s").run(run -> null);
    assertEquals(List.of(7L), admin.previewSlots(job, Instant.ofEpochSecond(5, 6), 3));
    assertEquals(List.of(7L), admin.previewSlots("job", null, 3));
    PreviewSlotsRequest bySpec = (PreviewSlotsRequest) asked.get(0);
    assertEquals(5, bySpec.getAfterTime().getSeconds());
    assertEquals(3, bySpec.getCount());
    JobSpec spec = bySpec.getSpec();
    assertEquals("job", spec.getName());
    PreviewSlotsRequest byName = (PreviewSlotsRequest) asked.get(1);
    assertEquals("job", byName.getJob());
    assertFalse(byName.hasAfterTime());
  }

  @Test
  void withoutASidecarTheErrorSaysHowToStartOne() throws InterruptedException {
    final int port = server.getPort();
    server.shutdown().awaitTermination();
    try (AdminClient other = AdminClient.builder().address("127.0.0.1:" + port).build()) {
      AnarchonException.Unavailable error =
          assertThrows(AnarchonException.Unavailable.class, () -> other.getInstance(""));
      assertTrue(error.getMessage().contains("or give the address of another"), error::getMessage);
    }
  }
}

package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import io.anarchon.v1.AdminServiceGrpc;
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
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Admin calls, over a connection. */
class AdminClientTest {
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> REASON =
      Metadata.Key.of("anarchon-reason", Metadata.ASCII_STRING_MARSHALLER);

  private final List<Object> asked = new CopyOnWriteArrayList<>();
  private final List<String> authorizations = new CopyOnWriteArrayList<>();
  private Server server;
  private AdminClient admin;

  /** A sidecar that has two pages of runs, and no job. */
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
    public void triggerRun(TriggerRunRequest request, StreamObserver<TriggerRunResponse> observer) {
      Run run = Run.newBuilder().setJob(request.getJob()).build();
      answer(request, TriggerRunResponse.newBuilder().setRun(run).build(), observer);
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
      return next.startCall(call, headers);
    }
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
  void aTriggerDrawsARequestIdWhereNoneIsGiven() {
    assertEquals("job", admin.triggerRun("job", new byte[] {1}).getJob());
    admin.triggerRun("job", new byte[0], "mine");
    TriggerRunRequest first = (TriggerRunRequest) asked.get(0);
    assertFalse(first.getRequestId().isEmpty());
    assertEquals(ByteString.copyFrom(new byte[] {1}), first.getPayload());
    assertEquals("mine", ((TriggerRunRequest) asked.get(1)).getRequestId());
    assertThrows(
        AnarchonException.WrongSetup.class, () -> admin.triggerRun("job", new byte[65_537]));
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
      assertTrue(error.getMessage().contains("start one with `anarchon serve`"), error::getMessage);
    }
  }
}

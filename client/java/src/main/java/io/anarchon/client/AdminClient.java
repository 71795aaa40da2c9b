package io.anarchon.client;

import com.google.protobuf.ByteString;
import com.google.protobuf.MessageLite;
import com.google.protobuf.Timestamp;
import io.anarchon.v1.AdminServiceGrpc;
import io.anarchon.v1.CancelRunRequest;
import io.anarchon.v1.GetInstanceRequest;
import io.anarchon.v1.GetJobRequest;
import io.anarchon.v1.GetRunRequest;
import io.anarchon.v1.Instance;
import io.anarchon.v1.ListInstancesRequest;
import io.anarchon.v1.ListInstancesResponse;
import io.anarchon.v1.ListJobsRequest;
import io.anarchon.v1.ListJobsResponse;
import io.anarchon.v1.ListRunsRequest;
import io.anarchon.v1.ListRunsResponse;
import io.anarchon.v1.PauseJobRequest;
import io.anarchon.v1.PreviewSlotsRequest;
import io.anarchon.v1.ResumeJobRequest;
import io.anarchon.v1.Run;
import io.anarchon.v1.TriggerRunRequest;
import io.anarchon.v1.WatchRunsRequest;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall;
import io.grpc.ForwardingClientCallListener;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * Asks a running sidecar about jobs, runs and instances of its whole namespace. Answers are the
 * protocol's own messages. Each call has 10 s, does not wait for a sidecar that is not there, and
 * is not repeated; a watch goes on until it is closed. Safe to use in any thread.
 *
 * <p>Calls throw an {@link AnarchonException.Unavailable} where no sidecar answers, an {@link
 * AnarchonException.NotFound} for what there is not, an {@link AnarchonException.Unsupported} for
 * what its store cannot do, an {@link AnarchonException.Refused} for a bad argument, and an {@link
 * AnarchonException.WrongSetup} for one that is too long to be sent. Lists are fetched page by page
 * while one goes through them, and throw then.
 */
public final class AdminClient implements AutoCloseable {
  private static final long TIMEOUT_S = 10;
  private static final int PAGE_SIZE = 500;
  private static final int PAYLOAD_MAX_BYTES = 64 << 10;
  private static final Metadata.Key<String> SCOPE =
      Metadata.Key.of("anarchon-scope", Metadata.ASCII_STRING_MARSHALLER);
  private static final int REASON_MAX_BYTES = 1_024;
  private static final int REQUEST_ID_MAX_BYTES = 128;
  private final Endpoint endpoint;
  private final Endpoint.Connection connection;
  private volatile String scope = "";

  private AdminClient(Endpoint endpoint) {
    this.endpoint = endpoint;
    connection = endpoint.connect();
  }

  /** Returns what makes a client. */
  public static Builder builder() {
    return new Builder();
  }

  /** Settings of a client. Every one has a default. */
  public static final class Builder {
    private String address;
    private String tokenFile;
    private ChannelCredentials credentials;

    private Builder() {}

    /** As {@link AnarchonClient.Builder#address}. */
    public Builder address(String address) {
      this.address = address;
      return this;
    }

    /** As {@link AnarchonClient.Builder#tokenFile}. */
    public Builder tokenFile(String file) {
      tokenFile = file;
      return this;
    }

    /** As {@link AnarchonClient.Builder#credentials}. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = credentials;
      return this;
    }

    /**
     * Returns the client. It connects with its first call.
     *
     * @throws AnarchonException.WrongSetup for what is set up wrongly
     */
    public AdminClient build() {
      return new AdminClient(new Endpoint(address, credentials, tokenFile));
    }
  }

  /** Lets go of the connection. */
  @Override
  public void close() {
    connection.close();
  }

  /**
   * Returns what the last answer of a call covers: "" for the whole namespace, "instance=ID" for
   * what that instance knows of itself, as its store keeps no history. Watches do not change it.
   */
  public String scope() {
    return scope;
  }

  /** Returns all jobs, by name. */
  public Iterable<io.anarchon.v1.Job> listJobs() {
    ListJobsRequest.Builder request = ListJobsRequest.newBuilder().setPageSize(PAGE_SIZE);
    return pages(
        token -> ask(stub -> stub.listJobs(request.clone().setPageToken(token).build())),
        ListJobsResponse::getJobsList,
        ListJobsResponse::getNextPageToken);
  }

  /** Returns one job. */
  public io.anarchon.v1.Job getJob(String job) {
    GetJobRequest request = GetJobRequest.newBuilder().setJob(job).build();
    return ask(stub -> stub.getJob(request)).getJob();
  }

  /**
   * Stops running the job's slots everywhere; returns the job as it is now. Once this has returned
   * no slot of the job is claimed. What runs goes on, and so do triggered runs. The reason is kept
   * for people, and may be empty.
   */
  public io.anarchon.v1.Job pauseJob(String job, String reason) {
    checkSize("reason", bytes(reason), REASON_MAX_BYTES);
    PauseJobRequest request = PauseJobRequest.newBuilder().setJob(job).setReason(reason).build();
    return ask(stub -> stub.pauseJob(request)).getJob();
  }

  /**
   * Runs the job's slots again, from now on; returns the job as it is now. Slots that fell due
   * meanwhile are recorded as skipped, in one row.
   */
  public io.anarchon.v1.Job resumeJob(String job) {
    ResumeJobRequest request = ResumeJobRequest.newBuilder().setJob(job).build();
    return ask(stub -> stub.resumeJob(request)).getJob();
  }

  /**
   * As {@link #triggerRun(String, byte[], String)}, with no payload and a request ID of its own.
   */
  public Run triggerRun(String job) {
    return triggerRun(job, new byte[0]);
  }

  /** As {@link #triggerRun(String, byte[], String)}, with a request ID of its own. */
  public Run triggerRun(String job, byte[] payload) {
    return triggerRun(job, payload, UUID.randomUUID().toString());
  }

  /**
   * Makes a run of the job that is due now, outside the schedule; returns it. The payload, at most
   * 64 KiB, is handed to the handler. The same request ID gives the same run, with the payload of
   * the first call, so that a call that failed may be repeated with its own. The run is skipped
   * where the job's overlap policy is to skip and another run is unfinished.
   */
  public Run triggerRun(String job, byte[] payload, String requestId) {
    checkSize("payload", payload.length, PAYLOAD_MAX_BYTES);
    checkSize("requestId", bytes(requestId), REQUEST_ID_MAX_BYTES);
    TriggerRunRequest request =
        TriggerRunRequest.newBuilder()
            .setJob(job)
            .setPayload(ByteString.copyFrom(payload))
            .setRequestId(requestId)
            .build();
    return ask(stub -> stub.triggerRun(request)).getRun();
  }

  /**
   * Asks a run to stop; returns it as it is now. One that no instance runs ends at once. The reason
   * is for people, and may be empty: it is handed to the handler, and kept with the run ({@link
   * Run#getCancelMessage}). A run that has ended is {@link AnarchonException.Refused}.
   */
  public Run cancelRun(String job, long slot, String reason) {
    checkSize("reason", bytes(reason), REASON_MAX_BYTES);
    CancelRunRequest request =
        CancelRunRequest.newBuilder().setJob(job).setSlot(slot).setReason(reason).build();
    return ask(stub -> stub.cancelRun(request)).getRun();
  }

  /**
   * Returns the next slots, 1 to 1,000, of a registered job after a moment (null: now), in
   * milliseconds since 1970-01-01T00:00:00Z.
   */
  public List<Long> previewSlots(String job, Instant after, int count) {
    return preview(PreviewSlotsRequest.newBuilder().setJob(job), after, count);
  }

  /** As {@link #previewSlots(String, Instant, int)}, of a job that need not be registered. */
  public List<Long> previewSlots(Job job, Instant after, int count) {
    return preview(PreviewSlotsRequest.newBuilder().setSpec(job.spec()), after, count);
  }

  private List<Long> preview(PreviewSlotsRequest.Builder request, Instant after, int count) {
    if (after != null) {
      request.setAfterTime(
          Timestamp.newBuilder().setSeconds(after.getEpochSecond()).setNanos(after.getNano()));
    }
    PreviewSlotsRequest whole = request.setCount(count).build();
    return ask(stub -> stub.previewSlots(whole)).getSlotsList();
  }

  /**
   * Returns runs, newest slot first: those that the request asks for, all for an empty one. Its
   * page's size and token are not looked at.
   */
  public Iterable<Run> listRuns(ListRunsRequest which) {
    ListRunsRequest.Builder request = which.toBuilder().setPageSize(PAGE_SIZE);
    return pages(
        token -> ask(stub -> stub.listRuns(request.clone().setPageToken(token).build())),
        ListRunsResponse::getRunsList,
        ListRunsResponse::getNextPageToken);
  }

  /**
   * Begins to watch runs: those that the request asks for, all for an empty one. Each run that is
   * unfinished comes, and then each as it is after a change. Changes that follow one another
   * closely may be merged, and a state may come twice, but the latest state of each run always
   * comes; a renewed lease is no change. Runs come without the stack traces of their attempts.
   *
   * <p>On return the watch has begun: list what there is after that, and nothing falls between. It
   * goes on until it is closed. Where the sidecar stops (reason {@code DRAINING}), or has not
   * reached its store for a minute ({@code STORE_UNAVAILABLE}), going through it throws {@link
   * AnarchonException.Unavailable}: watch again, and list what ended meanwhile.
   */
  public RunWatch watchRuns(WatchRunsRequest which) {
    return watchRuns(which, TimeUnit.SECONDS.toMillis(TIMEOUT_S));
  }

  RunWatch watchRuns(WatchRunsRequest which, long timeoutMs) {
    checkSize("request", which.getSerializedSize(), Session.MESSAGE_MAX_BYTES);
    throwIfStrange();
    return RunWatch.begin(endpoint, connection.channel(), which, timeoutMs);
  }

  /** Returns one run, with the stack traces of its attempts. */
  public Run getRun(String job, long slot) {
    GetRunRequest request = GetRunRequest.newBuilder().setJob(job).setSlot(slot).build();
    return ask(stub -> stub.getRun(request)).getRun();
  }

  /** Returns the instances seen lately. */
  public Iterable<Instance> listInstances() {
    ListInstancesRequest.Builder request = ListInstancesRequest.newBuilder().setPageSize(PAGE_SIZE);
    return pages(
        token -> ask(stub -> stub.listInstances(request.clone().setPageToken(token).build())),
        ListInstancesResponse::getInstancesList,
        ListInstancesResponse::getNextPageToken);
  }

  /** Returns one instance; "" is the one that answers. */
  public Instance getInstance(String instanceId) {
    GetInstanceRequest request = GetInstanceRequest.newBuilder().setInstanceId(instanceId).build();
    return ask(stub -> stub.getInstance(request)).getInstance();
  }

  /** Makes one call. */
  private <T> T ask(Function<AdminServiceGrpc.AdminServiceBlockingStub, T> call) {
    throwIfStrange();
    try {
      return call.apply(
          AdminServiceGrpc.newBlockingStub(connection.channel())
              .withInterceptors(new Calls())
              .withDeadlineAfter(TIMEOUT_S, TimeUnit.SECONDS));
    } catch (StatusRuntimeException error) {
      throw endpoint.error(error);
    }
  }

  private void throwIfStrange() {
    AnarchonException.Unavailable strange = endpoint.strangeSocket();
    if (strange != null) {
      throw strange;
    }
  }

  private static int bytes(String text) {
    return text.getBytes(StandardCharsets.UTF_8).length;
  }

  private static void checkSize(String argument, int bytes, int most) {
    if (bytes > most) {
      throw new AnarchonException.WrongSetup(
          argument + " of " + bytes + " bytes: must be at most " + most + " bytes");
    }
  }

  /** Hears what an answer covers; lets no request go that no sidecar reads, as grpc-java would. */
  private final class Calls implements ClientInterceptor {
    @Override
    public <A, B> ClientCall<A, B> interceptCall(
        MethodDescriptor<A, B> method, CallOptions options, Channel next) {
      return new ForwardingClientCall.SimpleForwardingClientCall<>(next.newCall(method, options)) {
        @Override
        public void start(Listener<B> listener, Metadata headers) {
          super.start(new Trailers<>(listener), headers);
        }

        @Override
        public void sendMessage(A message) {
          int bytes = ((MessageLite) message).getSerializedSize();
          checkSize("request", bytes, Session.MESSAGE_MAX_BYTES);
          super.sendMessage(message);
        }
      };
    }
  }

  private final class Trailers<B>
      extends ForwardingClientCallListener.SimpleForwardingClientCallListener<B> {
    Trailers(ClientCall.Listener<B> listener) {
      super(listener);
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      if (status.isOk()) {
        String covers = trailers.containsKey(SCOPE) ? trailers.get(SCOPE) : "";
        scope = URLDecoder.decode(covers.replace("+", "%2B"), StandardCharsets.UTF_8);
      }
      super.onClose(status, trailers);
    }
  }

  private static <P, T> Iterable<T> pages(
      Function<String, P> fetch, Function<P, List<T>> items, Function<P, String> nextToken) {
    return () -> new Pages<>(fetch, items, nextToken);
  }

  /** Goes through the items of all pages. */
  private static final class Pages<P, T> implements Iterator<T> {
    private final Function<String, P> fetch;
    private final Function<P, List<T>> items;
    private final Function<P, String> nextToken;
    private Iterator<T> page = List.<T>of().iterator();
    private String token = "";
    private boolean isLast;

    Pages(Function<String, P> fetch, Function<P, List<T>> items, Function<P, String> nextToken) {
      this.fetch = fetch;
      this.items = items;
      this.nextToken = nextToken;
    }

    @Override
    public boolean hasNext() {
      while (!page.hasNext() && !isLast) {
        P next = fetch.apply(token);
        page = items.apply(next).iterator();
        token = nextToken.apply(next);
        isLast = token.isEmpty();
      }
      return page.hasNext();
    }

    @Override
    public T next() {
      if (!hasNext()) {
        throw new NoSuchElementException();
      }
      return page.next();
    }
  }
}

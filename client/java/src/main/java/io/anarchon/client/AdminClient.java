package io.anarchon.client;

import com.google.protobuf.ByteString;
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
import io.grpc.ChannelCredentials;
import io.grpc.StatusRuntimeException;
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
 * is not repeated. Safe to use in any thread.
 *
 * <p>Calls throw an {@link AnarchonException.Unavailable} where no sidecar answers, an {@link
 * AnarchonException.NotFound} for what there is not, an {@link AnarchonException.Unsupported} for
 * what its store cannot do, and an {@link AnarchonException.Refused} for a bad argument. Lists are
 * fetched page by page while one goes through them, and throw then.
 */
public final class AdminClient implements AutoCloseable {
  private static final long TIMEOUT_S = 10;
  private static final int PAGE_SIZE = 500;
  private static final int PAYLOAD_MAX_BYTES = 64 << 10;
  private final Endpoint endpoint;
  private final Endpoint.Connection connection;

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
   * 64 KiB, is handed to the handler. The same request ID gives the same run, so that a call that
   * failed may be repeated with its own.
   *
   * @throws AnarchonException.WrongSetup for a payload that is too long
   */
  public Run triggerRun(String job, byte[] payload, String requestId) {
    if (payload.length > PAYLOAD_MAX_BYTES) {
      throw new AnarchonException.WrongSetup(
          "payload has " + payload.length + " bytes: must be at most " + PAYLOAD_MAX_BYTES);
    }
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
   * is for people, and may be empty.
   */
  public Run cancelRun(String job, long slot, String reason) {
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
    AnarchonException.Unavailable strange = endpoint.strangeSocket();
    if (strange != null) {
      throw strange;
    }
    try {
      return call.apply(
          AdminServiceGrpc.newBlockingStub(connection.channel())
              .withDeadlineAfter(TIMEOUT_S, TimeUnit.SECONDS));
    } catch (StatusRuntimeException error) {
      throw endpoint.error(error);
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

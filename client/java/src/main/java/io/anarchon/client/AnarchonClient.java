package io.anarchon.client;

import io.anarchon.v1.ClientInfo;
import io.anarchon.v1.SubscribeRequest;
import io.grpc.ChannelCredentials;
import java.io.IOException;
import java.net.InetAddress;
import java.net.UnknownHostException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.function.DoubleSupplier;

/**
 * An application's side of Anarchon.
 *
 * <pre>{@code
 * Job hello = Job.every("hello", "5s").run(ctx -> "hello");
 * AnarchonClient.builder().build().run(hello);
 * }</pre>
 *
 * <p>Nothing is connected before {@link #subscribe} or {@link #run}. Closing it stops all
 * subscriptions with its grace, and waits.
 */
public final class AnarchonClient implements AutoCloseable {
  /** The client library's version. */
  public static final String VERSION = "0.1.0";

  private static final int JOBS_MAX = 10_000;
  private static final int MAX_CONCURRENCY_MAX = 10_000;
  private final Builder settings;
  private final Endpoint endpoint;
  private final List<Subscription> subscriptions = new ArrayList<>();

  private AnarchonClient(Builder settings) {
    this.settings = settings;
    endpoint = new Endpoint(settings.address, settings.credentials, settings.tokenFile);
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
    private int maxConcurrency = 100;
    private Duration stopGrace = Duration.ofSeconds(20);
    private boolean exits;
    private boolean watched = true;
    private Transport transport;
    private Clock clock = Clock.system();
    private DoubleSupplier random = new SecureRandom()::nextDouble;

    private Builder() {}

    /**
     * The sidecar's, "host:port" or "unix:/path" (on Linux). Default: the environment's
     * ANARCHON_ADDRESS, else 127.0.0.1:7420.
     */
    public Builder address(String address) {
      this.address = address;
      return this;
    }

    /**
     * The file that holds the call token, read again when it changes. Default: the environment's
     * ANARCHON_TOKEN_FILE.
     */
    public Builder tokenFile(String file) {
      tokenFile = file;
      return this;
    }

    /** For a sidecar on another machine: {@code TlsChannelCredentials.create()}. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = credentials;
      return this;
    }

    /** The most handlers that run at once, 1 to 10,000. Default: 100. */
    public Builder maxConcurrency(int handlers) {
      if (handlers < 1 || handlers > MAX_CONCURRENCY_MAX) {
        throw new AnarchonException.WrongSetup(
            "maxConcurrency " + handlers + ": must be 1 to " + MAX_CONCURRENCY_MAX);
      }
      maxConcurrency = handlers;
      return this;
    }

    /** How long handlers may go on when the client stops. Default: 20 s. */
    public Builder stopGrace(Duration grace) {
      try {
        Durations.check("stopGrace", grace);
      } catch (AnarchonException.WrongJob error) {
        throw new AnarchonException.WrongSetup(error.getMessage());
      }
      stopGrace = grace;
      return this;
    }

    /** As {@link #stopGrace(Duration)}, with a text such as "20s". */
    public Builder stopGrace(String grace) {
      try {
        return stopGrace(Durations.parse("stopGrace", grace));
      } catch (AnarchonException.WrongJob error) {
        throw new AnarchonException.WrongSetup(error.getMessage());
      }
    }

    /**
     * Also ends the process, with status 1 and without its shutdown hooks, where a handler has not
     * stopped when its lease ends. By default the handler is told, and no more.
     */
    public Builder exitOnLeaseLost() {
      exits = true;
      return this;
    }

    /**
     * Whether the sidecar, where it can see this process, takes its end for the end of its
     * handlers, and hands their runs on at once. Default: true; false where what they started may
     * outlive it.
     */
    public Builder watched(boolean watched) {
      this.watched = watched;
      return this;
    }

    /** Talks to the fake, whatever the address says: for tests. */
    public Builder fakeSidecar(FakeSidecar fake) {
      transport = fake.transport();
      return this;
    }

    /**
     * Returns the client.
     *
     * @throws AnarchonException.WrongSetup for what is set up wrongly
     */
    public AnarchonClient build() {
      return new AnarchonClient(this);
    }
  }

  /**
   * Starts to run the jobs, and returns at once. A sidecar that is not there is no error: it is
   * looked for until there is one. What the sidecar refuses comes from {@link Subscription#closed}.
   *
   * @throws AnarchonException.WrongJob for jobs of one name, and for none or too many
   * @throws AnarchonException.WrongSetup for what is set up wrongly
   */
  public Subscription subscribe(Job... jobs) {
    Map<String, Job> byName = new LinkedHashMap<>();
    if (jobs.length < 1 || jobs.length > JOBS_MAX) {
      throw new AnarchonException.WrongJob(jobs.length + " jobs given: must be 1 to " + JOBS_MAX);
    }
    SubscribeRequest.Builder request =
        SubscribeRequest.newBuilder()
            .setSessionId(UUID.randomUUID().toString())
            .setClient(clientInfo(settings.watched))
            .setMaxConcurrency(settings.maxConcurrency);
    for (Job job : jobs) {
      if (byName.put(job.name(), job) != null) {
        throw new AnarchonException.WrongJob(
            "two jobs are named \"" + job.name() + "\": give one of them another name");
      }
      request.addJobs(job.spec());
    }
    SubscribeRequest whole = request.build();
    if (whole.getSerializedSize() > Session.MESSAGE_MAX_BYTES) {
      throw Session.tooLarge(whole.getSerializedSize());
    }
    endpoint.checkSocket();
    Transport transport =
        settings.transport == null
            ? new GrpcTransport(endpoint, settings.random)
            : settings.transport;
    Subscription subscription =
        new Subscription(
            whole,
            byName,
            transport,
            settings.clock,
            settings.random,
            settings.stopGrace,
            settings.exits);
    synchronized (subscriptions) {
      subscriptions.removeIf(Subscription::isOver);
      subscriptions.add(subscription);
    }
    return subscription;
  }

  /**
   * Runs the jobs until SIGINT or SIGTERM, that is, until the JVM shuts down, and then stops as
   * {@link Subscription#stop} does; a second signal ends the grace. An interrupt of the calling
   * thread stops as well, a second one ends the grace; it stays set. Blocks; throws what {@link
   * #subscribe} and {@link Subscription#await} throw. The JVM waits for the end of the handlers,
   * but not for what the calling thread does after this.
   */
  public void run(Job... jobs) {
    Subscription subscription = subscribe(jobs);
    subscription.stopAtShutdown();
    try {
      subscription.await();
    } catch (InterruptedException error) {
      try {
        subscription.close();
      } finally {
        Thread.currentThread().interrupt();
      }
    }
  }

  @Override
  public void close() {
    List<Subscription> all;
    synchronized (subscriptions) {
      all = List.copyOf(subscriptions);
    }
    all.forEach(Subscription::stop);
    all.forEach(Subscription::close);
  }

  private static ClientInfo clientInfo(boolean watched) {
    ClientInfo.Builder info =
        ClientInfo.newBuilder()
            .setLanguage("java")
            .setVersion(VERSION)
            .setHost(hostName())
            .setProcessId((int) ProcessHandle.current().pid());
    if (watched) {
      try {
        String stat = Files.readString(Path.of("/proc/self/stat"), StandardCharsets.ISO_8859_1);
        // The command's name, in brackets, may hold anything; the fields are counted after it.
        String[] fields = stat.substring(stat.lastIndexOf(')') + 1).strip().split(" ");
        Object inode = Files.getAttribute(Path.of("/proc/self/ns/pid"), "unix:ino");
        info.setProcessStartTicks(Long.parseLong(fields[22 - 3]));
        info.setPidNamespace(((Number) inode).longValue());
      } catch (IOException | RuntimeException none) {
        // There is no /proc: the process's end is then not watched for.
        info.clearProcessStartTicks().clearPidNamespace();
      }
    }
    return info.build();
  }

  /** The system's own word for it, where it says one: Java's may wait for a name server. */
  private static String hostName() {
    try {
      return Files.readString(Path.of("/proc/sys/kernel/hostname")).strip();
    } catch (IOException elsewhere) {
      return hostNameByJava();
    }
  }

  private static String hostNameByJava() {
    try {
      return InetAddress.getLocalHost().getHostName();
    } catch (UnknownHostException error) {
      return ""; // it is for people only
    }
  }
}

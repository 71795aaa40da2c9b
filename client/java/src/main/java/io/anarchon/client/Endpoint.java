package io.anarchon.client;

import io.grpc.CallCredentials;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.ChannelOption;
import io.grpc.netty.shaded.io.netty.channel.EventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.epoll.Epoll;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.unix.DomainSocketAddress;
import java.io.IOException;
import java.net.InetAddress;
import java.net.UnknownHostException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.Path;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Where a sidecar is, and what opens its door. */
final class Endpoint {
  static final String DEFAULT_ADDRESS = "127.0.0.1:7420";

  /** What a socket address of the system can hold, with its closing zero. */
  private static final int UNIX_PATH_MAX_BYTES = 107;

  private static final int OTHERS_WRITE = 0022;

  private static final Pattern HOST_AND_PORT =
      Pattern.compile("(\\[[0-9A-Fa-f:.%]+]|[A-Za-z0-9._-]+):([0-9]{1,5})");
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> REASON =
      Metadata.Key.of("anarchon-reason", Metadata.ASCII_STRING_MARSHALLER);

  final String address;
  private final ChannelCredentials credentials;
  private final CallToken token;

  /**
   * Of what was given, else of ANARCHON_ADDRESS and ANARCHON_TOKEN_FILE; null is "not given".
   *
   * @throws AnarchonException.WrongSetup for what is wrong
   */
  Endpoint(String address, ChannelCredentials credentials, String tokenFile) {
    this.address = firstOf(address, System.getenv("ANARCHON_ADDRESS"), DEFAULT_ADDRESS);
    this.credentials = credentials;
    boolean isSecure = credentials != null && !(credentials instanceof InsecureChannelCredentials);
    if (!isLocal(this.address) && !isSecure) {
      throw new AnarchonException.WrongSetup(
          "address \""
              + this.address
              + "\": is not on this machine, so calls to it need TLS: give "
              + "credentials(TlsChannelCredentials.create()), or the address of a local sidecar");
    }
    checkSocket();
    token = new CallToken(firstOf(tokenFile, System.getenv("ANARCHON_TOKEN_FILE"), ""));
  }

  private static String firstOf(String... texts) {
    for (String text : texts) {
      if (text != null && !text.isEmpty()) {
        return text;
      }
    }
    return "";
  }

  String address() {
    return address;
  }

  private static boolean isLocal(String address) {
    if (address.startsWith("unix:")) {
      String path = socketPath(address);
      if (!path.startsWith("/")) {
        throw wrong(address, "must be unix:/absolute/path");
      }
      if (path.getBytes(StandardCharsets.UTF_8).length > UNIX_PATH_MAX_BYTES) {
        throw wrong(address, "a socket's path has at most " + UNIX_PATH_MAX_BYTES + " bytes");
      }
      if (!Epoll.isAvailable()) {
        throw wrong(address, "sockets of this kind are for Linux; use host:port here");
      }
      return true;
    }
    Matcher match = HOST_AND_PORT.matcher(address);
    if (!match.matches() || portOf(match) < 1 || portOf(match) > 65_535) {
      throw wrong(
          address, "must be \"host:port\" such as \"" + DEFAULT_ADDRESS + "\", or \"unix:/path\"");
    }
    return isLoopback(match.group(1));
  }

  private static int portOf(Matcher match) {
    return Integer.parseInt(match.group(2));
  }

  /** A name is not looked up: only "localhost" is taken for this machine. */
  private static boolean isLoopback(String host) {
    if (host.equals("localhost")) {
      return true;
    }
    boolean isNumber = host.startsWith("[") || host.matches("[0-9]+(\\.[0-9]+){3}");
    try {
      return isNumber && InetAddress.getByName(host).isLoopbackAddress();
    } catch (UnknownHostException error) {
      return false;
    }
  }

  private static String socketPath(String address) {
    return address.replaceFirst("^unix:(//)?", "");
  }

  private static AnarchonException.WrongSetup wrong(String address, String why) {
    return new AnarchonException.WrongSetup("address \"" + address + "\": " + why);
  }

  /**
   * Throws if somebody else than the sidecar's user could have put a socket there.
   *
   * <p>A sidecar makes its socket in a directory that belongs to its user and that nobody else may
   * write, so a socket that lies otherwise is not a sidecar's. One that is not there is no error.
   */
  void checkSocket() {
    if (!address.startsWith("unix:")) {
      return;
    }
    Path path = Path.of(socketPath(address));
    Path directory = path.getParent() == null ? path : path.getParent(); // the root has none
    int socketOwner;
    int directoryOwner;
    int mode;
    try {
      socketOwner = (int) Files.getAttribute(path, "unix:uid", LinkOption.NOFOLLOW_LINKS);
      directoryOwner = (int) Files.getAttribute(directory, "unix:uid");
      mode = (int) Files.getAttribute(directory, "unix:mode") & 07777;
    } catch (IOException error) {
      return; // nor is one that cannot be seen: connecting says what is wrong
    }
    if (socketOwner != directoryOwner || (mode & OTHERS_WRITE) != 0) {
      throw wrong(
          address,
          String.format(
              "the socket belongs to user %d and lies in a directory of user %d, mode %04o, so it "
                  + "may be somebody else's than the sidecar's: both must belong to one user, and "
                  + "nobody else may write in the directory",
              socketOwner, directoryOwner, mode));
    }
  }

  /** Returns why a socket is not called that may be somebody else's; null: it may be called. */
  AnarchonException.Unavailable strangeSocket() {
    try {
      checkSocket();
      return null;
    } catch (AnarchonException.WrongSetup error) {
      return new AnarchonException.Unavailable(error.getMessage(), "");
    }
  }

  /** What to say where no sidecar answers, and what to do about it. */
  String absence() {
    String advice = "; start one with `anarchon serve`, or give the address of another";
    return "no sidecar answers at " + address + (isLocal(address) ? advice : "");
  }

  /** A channel, and what it holds. */
  record Connection(ManagedChannel channel, EventLoopGroup loops) {
    void close() {
      channel.shutdownNow();
      if (loops != null) {
        loops.shutdownGracefully(0, 0, TimeUnit.SECONDS);
      }
    }
  }

  /** Returns a channel; it connects when it is first used. */
  Connection connect() {
    ChannelCredentials security =
        credentials == null ? InsecureChannelCredentials.create() : credentials;
    NettyChannelBuilder builder;
    EventLoopGroup loops = null;
    if (address.startsWith("unix:")) {
      loops = new EpollEventLoopGroup(1, daemons());
      builder =
          NettyChannelBuilder.forAddress(new DomainSocketAddress(socketPath(address)), security)
              .eventLoopGroup(loops)
              .channelType(EpollDomainSocketChannel.class, DomainSocketAddress.class)
              // gRPC asks for it of every channel, and Netty warns where there is no such thing.
              .withOption(ChannelOption.SO_KEEPALIVE, null)
              .overrideAuthority("localhost");
    } else {
      int colon = address.lastIndexOf(':');
      String host = address.substring(0, colon).replaceAll("[\\[\\]]", "");
      int port = Integer.parseInt(address.substring(colon + 1));
      builder = NettyChannelBuilder.forAddress(host, port, security);
    }
    ManagedChannel channel =
        builder
            .proxyDetector(target -> null) // a sidecar is never behind the environment's proxy
            .disableRetry()
            .disableServiceConfigLookUp()
            .maxInboundMessageSize(Session.MESSAGE_MAX_BYTES)
            .intercept(new Calls())
            .build();
    return new Connection(channel, loops);
  }

  static java.util.concurrent.ThreadFactory daemons() {
    return task -> {
      Thread thread = new Thread(task, "anarchon-io");
      thread.setDaemon(true);
      return thread;
    };
  }

  /** Returns what a failed call means. */
  AnarchonException.Sidecar error(Throwable thrown) {
    Status status = Status.fromThrowable(thrown);
    if (status.getCause() instanceof AnarchonException.Unavailable ours) {
      return ours;
    }
    Metadata trailers = Status.trailersFromThrowable(thrown);
    String reason = trailers == null ? null : trailers.get(REASON);
    String message = status.getDescription() == null ? "" : status.getDescription();
    if (reason == null) {
      switch (status.getCode()) {
        case UNIMPLEMENTED ->
            message = "the server at " + address + " does not speak anarchon.v1: " + message;
        case UNAVAILABLE -> message = unavailable(message, status.getCause());
        case DEADLINE_EXCEEDED -> message = "the sidecar at " + address + " did not answer in time";
        default -> {}
      }
    }
    return AnarchonException.ofStatus(status.getCode(), reason == null ? "" : reason, message);
  }

  /**
   * What gRPC says of a connection, in words for people where it is only that none was made. With
   * credentials there are more ways to fail than one, and only gRPC's words tell them apart.
   */
  private String unavailable(String details, Throwable cause) {
    boolean isAbsent =
        cause instanceof java.net.ConnectException
            || cause instanceof java.io.FileNotFoundException;
    if (!isAbsent) {
      String why = cause == null ? details : details + ": " + cause.getMessage();
      return "the connection to the sidecar at " + address + " is lost: " + why;
    }
    return credentials == null ? absence() : absence() + ": " + cause.getMessage();
  }

  /**
   * What goes with every call: the call token, if what listens may be told it. It is asked for when
   * there is a connection, which may be long after the call was made.
   */
  private final class Calls extends CallCredentials implements ClientInterceptor {
    @Override
    public <A, B> ClientCall<A, B> interceptCall(
        MethodDescriptor<A, B> method, CallOptions options, Channel next) {
      return next.newCall(method, options.withCallCredentials(this));
    }

    @Override
    public void applyRequestMetadata(RequestInfo call, Executor executor, MetadataApplier applier) {
      AnarchonException.Unavailable strange = strangeSocket();
      if (strange != null) {
        applier.fail(Status.UNAVAILABLE.withCause(strange));
        return;
      }
      Metadata headers = new Metadata();
      String text = token.current();
      if (!text.isEmpty()) {
        headers.put(AUTHORIZATION, "Bearer " + text);
      }
      applier.apply(headers);
    }
  }
}

package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.anarchon.v1.Attached;
import io.anarchon.v1.CompleteRequest;
import io.anarchon.v1.CompleteResponse;
import io.anarchon.v1.KeepAliveRequest;
import io.anarchon.v1.KeepAliveResponse;
import io.anarchon.v1.SessionServiceGrpc;
import io.anarchon.v1.SubscribeRequest;
import io.anarchon.v1.SubscribeResponse;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.netty.shaded.io.netty.channel.EventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollServerDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.unix.DomainSocketAddress;
import io.grpc.stub.StreamObserver;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

/** The session's calls over a connection, and what goes with them. */
class GrpcTransportTest {
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private final List<String> authorizations = new CopyOnWriteArrayList<>();
  private Server server;
  private Transport transport;
  private EventLoopGroup loops;

  /** A sidecar that attaches, and answers keep-alives. */
  private static final class Answers extends SessionServiceGrpc.SessionServiceImplBase {
    @Override
    public void subscribe(SubscribeRequest request, StreamObserver<SubscribeResponse> observer) {
      observer.onNext(
          SubscribeResponse.newBuilder().setAttached(Attached.getDefaultInstance()).build());
    }

    @Override
    public void complete(CompleteRequest request, StreamObserver<CompleteResponse> observer) {
      observer.onNext(CompleteResponse.getDefaultInstance());
      observer.onCompleted();
    }

    @Override
    public void keepAlive(KeepAliveRequest request, StreamObserver<KeepAliveResponse> observer) {
      observer.onNext(KeepAliveResponse.getDefaultInstance());
      observer.onCompleted();
    }
  }

  private final class Seen implements ServerInterceptor {
    @Override
    public <A, B> ServerCall.Listener<A> interceptCall(
        ServerCall<A, B> call, Metadata headers, ServerCallHandler<A, B> next) {
      authorizations.add(String.valueOf(headers.get(AUTHORIZATION)));
      return next.startCall(call, headers);
    }
  }

  /** What comes first on a stream: an event, or its end. */
  private static final class First implements Transport.Events {
    final CompletableFuture<SubscribeResponse> event = new CompletableFuture<>();

    @Override
    public void event(SubscribeResponse it) {
      event.complete(it);
    }

    @Override
    public void ended(AnarchonException.Sidecar error) {
      event.completeExceptionally(error);
    }

    /** The same of a single call. */
    <T> Transport.Answer<T> answer() {
      return new Transport.Answer<>() {
        @Override
        public void answered(T response) {
          event.complete(SubscribeResponse.getDefaultInstance());
        }

        @Override
        public void failed(AnarchonException.Sidecar error) {
          ended(error);
        }
      };
    }
  }

  private void serve(NettyServerBuilder builder) throws IOException {
    server = builder.addService(new Answers()).intercept(new Seen()).build().start();
  }

  @AfterEach
  void close() throws InterruptedException {
    transport.close();
    if (server != null) {
      server.shutdownNow().awaitTermination();
    }
    if (loops != null) {
      loops.shutdownGracefully(0, 0, TimeUnit.SECONDS);
    }
  }

  @Test
  void theCallTokenIsTheOneOfTheTimeAtWhichTheSidecarIsThere(@TempDir Path directory)
      throws Exception {
    Path file = Files.writeString(directory.resolve("token"), "old");
    InetSocketAddress address = freeAddress();
    transport =
        new GrpcTransport(
            new Endpoint("127.0.0.1:" + address.getPort(), null, file.toString()), () -> 0.5);
    First first = new First();
    transport.subscribe(SubscribeRequest.getDefaultInstance(), first);
    Files.writeString(file, "newer");
    serve(NettyServerBuilder.forAddress(address));
    assertTrue(first.event.get().hasAttached());
    assertEquals(List.of("Bearer newer"), authorizations);
  }

  @Test
  @EnabledOnOs(OS.LINUX)
  void aSocketThatAppearsWhereOthersMayWriteIsToldNothing(@TempDir Path directory)
      throws Exception {
    Path token = Files.writeString(directory.resolve("token"), "secret");
    Path open = Files.createDirectory(directory.resolve("open"));
    Files.setPosixFilePermissions(open, PosixFilePermissions.fromString("rwxrwxrwx"));
    Path socket = open.resolve("s");
    transport =
        new GrpcTransport(new Endpoint("unix:" + socket, null, token.toString()), () -> 0.5);
    First first = new First();
    transport.subscribe(SubscribeRequest.getDefaultInstance(), first);
    loops = new EpollEventLoopGroup(1, Endpoint.daemons());
    serve(
        NettyServerBuilder.forAddress(new DomainSocketAddress(socket.toString()))
            .channelType(EpollServerDomainSocketChannel.class)
            .bossEventLoopGroup(loops)
            .workerEventLoopGroup(loops));
    Throwable refused = assertEndsWith(first, AnarchonException.Unavailable.class);
    assertTrue(refused.getMessage().contains("nobody else may write in the directory"));
    assertEquals(List.of(), authorizations);
  }

  @Test
  @EnabledOnOs(OS.LINUX)
  void aUnixSocketIsConnectedToWithoutAWarning(@TempDir Path directory) throws Exception {
    Path socket = directory.resolve("s");
    loops = new EpollEventLoopGroup(1, Endpoint.daemons());
    serve(
        NettyServerBuilder.forAddress(new DomainSocketAddress(socket.toString()))
            .channelType(EpollServerDomainSocketChannel.class)
            .bossEventLoopGroup(loops)
            .workerEventLoopGroup(loops));
    PrintStream before = System.err; // where the tests' logging goes
    ByteArrayOutputStream logged = new ByteArrayOutputStream();
    System.setErr(new PrintStream(logged, true, StandardCharsets.UTF_8));
    try {
      transport = new GrpcTransport(new Endpoint("unix:" + socket, null, null), () -> 0.5);
      First first = new First();
      transport.subscribe(SubscribeRequest.getDefaultInstance(), first);
      assertTrue(first.event.get().hasAttached());
    } finally {
      System.setErr(before);
    }
    List<String> ofTheClient =
        logged
            .toString(StandardCharsets.UTF_8)
            .lines()
            .filter(line -> !line.contains("ServerBootstrap"))
            .toList();
    assertEquals(List.of(), ofTheClient);
  }

  @Test
  void aKeepAliveDoesNotWaitForASidecarAndAResultDoes() throws Exception {
    InetSocketAddress address = freeAddress();
    transport =
        new GrpcTransport(new Endpoint("127.0.0.1:" + address.getPort(), null, null), () -> 0.5);
    First none = new First();
    transport.keepAlive(KeepAliveRequest.getDefaultInstance(), 600_000, none.answer());
    Throwable absent = assertEndsWith(none, AnarchonException.Unavailable.class);
    assertEquals(
        "no sidecar answers at 127.0.0.1:"
            + address.getPort()
            + "; start one with `anarchon serve`, or give the address of another",
        absent.getMessage());
    First late = new First();
    transport.complete(CompleteRequest.getDefaultInstance(), 600_000, late.answer());
    serve(NettyServerBuilder.forAddress(address));
    late.event.get();
  }

  private static InetSocketAddress freeAddress() throws IOException {
    try (ServerSocket free = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      return new InetSocketAddress(free.getInetAddress(), free.getLocalPort());
    }
  }

  private static Throwable assertEndsWith(First first, Class<?> kind) throws InterruptedException {
    try {
      throw new AssertionError("it was told: " + first.event.get());
    } catch (ExecutionException error) {
      assertEquals(kind, error.getCause().getClass());
      return error.getCause();
    }
  }
}

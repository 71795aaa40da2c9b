package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertDoesNotThrow;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.InsecureChannelCredentials;
import io.grpc.Status;
import io.grpc.TlsChannelCredentials;
import java.io.IOException;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.channels.ServerSocketChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

/** Addresses, sockets, call tokens, and what a status means. */
class EndpointTest {
  private static final String LONG = "unix:/" + "x".repeat(107);

  @Test
  void anAddressThatIsNoneIsRefused() {
    Map.of(
            "nowhere",
            "must be \"host:port\"",
            "host:0",
            "must be \"host:port\"",
            "host:70000",
            "must be \"host:port\"",
            "unix:relative",
            "must be unix:/absolute/path",
            LONG,
            "at most 107 bytes",
            "10.0.0.1:7420",
            "calls to it need TLS",
            "anarchon.example:7420",
            "calls to it need TLS",
            "localhost.example:7420",
            "calls to it need TLS")
        .forEach(
            (address, words) -> {
              AnarchonException error =
                  assertThrows(
                      AnarchonException.WrongSetup.class,
                      () -> AnarchonClient.builder().address(address).build());
              assertTrue(error.getMessage().contains(words), error::getMessage);
            });
  }

  @Test
  void anAddressOnThisMachineNeedsNothingMoreAndAnyOtherTls() {
    for (String address : List.of("localhost:1", "127.0.0.2:7420", "[::1]:7420")) {
      AnarchonClient.builder().address(address).build();
    }
    AnarchonClient.builder()
        .address("anarchon.example:7420")
        .credentials(assertDoesNotThrow(TlsChannelCredentials::create))
        .build();
  }

  @Test
  void credentialsThatAreNotSecureAreNoTls() {
    AnarchonClient.Builder builder =
        AnarchonClient.builder().credentials(InsecureChannelCredentials.create());
    builder.address("localhost:7420").build();
    builder.address("anarchon.example:7420");
    assertThrows(AnarchonException.WrongSetup.class, builder::build);
  }

  @Test
  @EnabledOnOs(OS.LINUX)
  void aSocketThatOthersMayHavePutThereIsNotCalled(@TempDir Path directory) throws IOException {
    Path path = directory.resolve("s");
    try (ServerSocketChannel socket = ServerSocketChannel.open(StandardProtocolFamily.UNIX)) {
      socket.bind(UnixDomainSocketAddress.of(path));
      Files.setPosixFilePermissions(directory, PosixFilePermissions.fromString("rwxr-xr-x"));
      Endpoint endpoint = new Endpoint("unix:" + path, null, null);
      assertNull(endpoint.strangeSocket());
      Files.setPosixFilePermissions(directory, PosixFilePermissions.fromString("rwxrwxrwx"));
      assertTrue(
          endpoint.strangeSocket().getMessage().contains("nobody else may write in the directory"));
      assertThrows(
          AnarchonException.WrongSetup.class, () -> new Endpoint("unix:" + path, null, null));
    }
  }

  @Test
  @EnabledOnOs(OS.LINUX)
  void theRootIsNoSocketAndNoErrorBeforeItIsCalled() {
    assertNull(new Endpoint("unix:/", null, null).strangeSocket());
  }

  @Test
  void aCallTokenThatCannotBeReadIsNamedWithTheReason(@TempDir Path directory) {
    String file = directory.resolve("none").toString();
    AnarchonException.WrongSetup error =
        assertThrows(AnarchonException.WrongSetup.class, () -> new CallToken(file));
    assertEquals("token file \"" + file + "\": No such file or directory", error.getMessage());
  }

  @Test
  void theCallTokenIsReadAgainWhenItsFileHasChanged(@TempDir Path directory) throws IOException {
    Path file = directory.resolve("token");
    replace(file, "\n  first \nsecond\n");
    CallToken token = new CallToken(file.toString());
    assertEquals("first", token.current());
    replace(file, "second\n");
    assertEquals("second", token.current());
    replace(file, "with space\n");
    assertEquals("second", token.current());
    Files.delete(file);
    assertEquals("second", token.current());
    assertThrows(AnarchonException.WrongSetup.class, () -> new CallToken(file.toString()));
    assertEquals("", new CallToken("").current());
  }

  private static void replace(Path file, String text) throws IOException {
    Path next = file.resolveSibling("next");
    Files.writeString(next, text);
    Files.move(next, file, StandardCopyOption.ATOMIC_MOVE);
  }

  @Test
  void theReasonDecidesWhatAStatusMeansElseTheCode() {
    assertMeans(AnarchonException.Refused.class, Status.Code.INVALID_ARGUMENT, "");
    assertMeans(AnarchonException.Refused.class, Status.Code.FAILED_PRECONDITION, "");
    assertMeans(AnarchonException.Unsupported.class, Status.Code.INTERNAL, "UNSUPPORTED");
    assertMeans(AnarchonException.Version.class, Status.Code.FAILED_PRECONDITION, "VERSION");
    assertMeans(AnarchonException.Version.class, Status.Code.UNIMPLEMENTED, "");
    assertMeans(AnarchonException.Credentials.class, Status.Code.INTERNAL, "BAD_CREDENTIALS");
    assertMeans(AnarchonException.Credentials.class, Status.Code.UNAUTHENTICATED, "");
    assertMeans(AnarchonException.Credentials.class, Status.Code.PERMISSION_DENIED, "");
    assertMeans(AnarchonException.Refused.class, Status.Code.INTERNAL, "LIMIT_EXCEEDED");
    assertMeans(
        AnarchonException.SessionNotFound.class, Status.Code.NOT_FOUND, "SESSION_NOT_FOUND");
    assertMeans(AnarchonException.NotFound.class, Status.Code.INTERNAL, "JOB_NOT_FOUND");
    assertMeans(AnarchonException.NotFound.class, Status.Code.NOT_FOUND, "");
    assertMeans(AnarchonException.SessionReplaced.class, Status.Code.ABORTED, "SESSION_REPLACED");
    assertMeans(AnarchonException.Unavailable.class, Status.Code.ABORTED, "");
    assertMeans(AnarchonException.Unavailable.class, Status.Code.INTERNAL, "LATER_WORD");
    assertMeans(AnarchonException.Refused.class, Status.Code.INVALID_ARGUMENT, "LATER_WORD");
  }

  private static void assertMeans(Class<?> kind, Status.Code code, String reason) {
    AnarchonException.Sidecar error = AnarchonException.ofStatus(code, reason, "words");
    assertEquals(kind, error.getClass(), code + " " + reason);
    assertEquals(reason, error.reason());
    assertEquals("words", error.getMessage());
  }
}

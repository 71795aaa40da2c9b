package io.anarchon.client;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.AccessDeniedException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.attribute.BasicFileAttributes;
import java.util.regex.Pattern;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** The token in a file, read again when the file has changed. Safe to use in any thread. */
final class CallToken {
  private static final Logger LOG = LoggerFactory.getLogger("anarchon");
  private static final Pattern PRINTABLE = Pattern.compile("[!-~]{1,4096}");

  private record Stamp(Object key, long time, long size) {}

  private final String file;
  private Stamp seen;
  private String token = "";

  /** "" is none. Throws WrongSetup where the file cannot be read. */
  CallToken(String file) {
    this.file = file;
    if (!file.isEmpty()) {
      read();
    }
  }

  /**
   * Returns the token, or "". A file that is just being replaced changes nothing: the token before
   * goes on being used.
   */
  synchronized String current() {
    if (!file.isEmpty()) {
      try {
        read();
      } catch (AnarchonException.WrongSetup error) {
        LOG.warn("the call token stays as it was: {}", error.getMessage());
      }
    }
    return token;
  }

  private void read() {
    String text;
    Stamp stamp;
    try {
      BasicFileAttributes now = Files.readAttributes(Path.of(file), BasicFileAttributes.class);
      stamp =
          new Stamp(
              now.fileKey(),
              now.lastModifiedTime().to(java.util.concurrent.TimeUnit.NANOSECONDS),
              now.size());
      if (stamp.equals(seen)) {
        return;
      }
      text = Files.readString(Path.of(file), StandardCharsets.ISO_8859_1);
    } catch (IOException error) {
      throw new AnarchonException.WrongSetup("token file \"" + file + "\": " + why(error));
    }
    // The sidecar's own file may hold two while one replaces the other: the first is sent.
    String first =
        text.lines().map(String::strip).filter(line -> !line.isEmpty()).findFirst().orElse("");
    if (!PRINTABLE.matcher(first).matches()) {
      throw new AnarchonException.WrongSetup(
          "token file \""
              + file
              + "\": must begin with one line of printable ASCII without spaces");
    }
    seen = stamp;
    token = first;
  }

  /** In the system's words, where Java says it by the kind of the exception alone. */
  private static String why(IOException error) {
    if (error instanceof NoSuchFileException) {
      return "No such file or directory";
    }
    return error instanceof AccessDeniedException ? "Permission denied" : error.getMessage();
  }
}

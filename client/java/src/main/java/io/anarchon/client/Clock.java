package io.anarchon.client;

import java.io.IOException;
import java.io.RandomAccessFile;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;

/**
 * Milliseconds that only go forward and go on while the machine sleeps (S3), rounded down, from an
 * origin that means nothing.
 */
interface Clock {
  long now();

  /** Returns the system's own, one for all. */
  static Clock system() {
    return OfTheSystem.CLOCK;
  }

  /** Holds it, once somebody asks. */
  final class OfTheSystem {
    private static final Clock CLOCK = choose();

    private OfTheSystem() {}

    private static Clock choose() {
      try {
        return new UpTime(Path.of("/proc/uptime"));
      } catch (IOException none) {
        return new NeverSlower();
      }
    }
  }

  /**
   * Linux's time since its start, which counts sleep; Java's own clock does not.
   *
   * <p>The file stays open, so that a process that has no file descriptor left goes on knowing the
   * time. It is no channel: those are closed where an interrupted thread reads them.
   */
  final class UpTime implements Clock {
    private final RandomAccessFile file;
    private final byte[] buffer = new byte[64];

    UpTime(Path path) throws IOException {
      file = new RandomAccessFile(path.toFile(), "r");
    }

    @Override
    public synchronized long now() {
      try {
        file.seek(0);
        int length = Math.max(0, file.read(buffer));
        String text = new String(buffer, 0, length, StandardCharsets.US_ASCII);
        int point = text.indexOf('.');
        long seconds = Long.parseLong(text.substring(0, point));
        return seconds * 1_000 + Long.parseLong(text.substring(point + 1, point + 3)) * 10;
      } catch (IOException error) {
        throw new IllegalStateException("the system's clock cannot be read", error);
      }
    }
  }

  /**
   * Elsewhere no clock of Java's counts sleep. This one goes on at least as fast as the monotonic
   * clock and as the wall clock: what it gets wrong ends trust too early, never too late.
   */
  final class NeverSlower implements Clock {
    private final long nanos = System.nanoTime();
    private final long wall = System.currentTimeMillis();
    private long last;

    @Override
    public synchronized long now() {
      long elapsed = (System.nanoTime() - nanos) / 1_000_000;
      last = Math.max(last, Math.max(elapsed, System.currentTimeMillis() - wall));
      return last;
    }
  }
}

package io.anarchon.client;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;

/**
 * Milliseconds that only go forward and go on while the machine sleeps (S3), rounded down, from an
 * origin that means nothing.
 */
interface Clock {
  long now();

  /** Returns the system's own. */
  static Clock system() {
    return Files.isReadable(UpTime.FILE) ? new UpTime() : new NeverSlower();
  }

  /** Linux's time since its start, which counts sleep; Java's own clock does not. */
  final class UpTime implements Clock {
    static final Path FILE = Path.of("/proc/uptime");

    @Override
    public long now() {
      try {
        String text = Files.readString(FILE, StandardCharsets.US_ASCII);
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

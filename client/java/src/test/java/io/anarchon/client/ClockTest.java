package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.DisabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

class ClockTest {
  @Test
  @DisabledOnOs(OS.WINDOWS)
  void goesOnWithoutAnotherFileDescriptorAndInAThreadThatIsInterrupted(@TempDir Path directory)
      throws IOException {
    Path file = Files.writeString(directory.resolve("uptime"), "4311.07 8600.11\n");
    Clock clock = new Clock.UpTime(file);
    assertEquals(4_311_070, clock.now());
    Files.writeString(file, "4312.50 8601.00\n");
    Files.move(file, directory.resolve("elsewhere")); // it cannot be opened again
    Thread.currentThread().interrupt();
    assertEquals(4_312_500, clock.now());
    assertTrue(Thread.interrupted());
  }

  @Test
  void theSystemsOwnGoesForward() {
    long before = Clock.system().now();
    assertTrue(Clock.system().now() >= before);
  }
}

package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.DisabledOnOs;
import org.junit.jupiter.api.condition.OS;

/** Signals, in a process of their own. */
@DisabledOnOs(OS.WINDOWS)
class ShutdownTest {
  private static final int BY_SIGTERM = 128 + 15;

  /** An application whose handler goes on until it is cancelled, with an hour's grace. */
  static final class Application {
    public static void main(String[] arguments) throws InterruptedException {
      CompletableFuture.delayedExecutor(50, TimeUnit.SECONDS)
          .execute(() -> Runtime.getRuntime().halt(99)); // the test has gone wrong
      FakeSidecar fake = new FakeSidecar();
      CountDownLatch started = new CountDownLatch(1);
      Job job =
          Job.every("job", "1h")
              .runs(
                  run -> {
                    started.countDown();
                    run.sleep("1h");
                  });
      Thread helper =
          new Thread(
              () -> {
                String token = fake.assign("job", "");
                try {
                  started.await();
                } catch (InterruptedException error) {
                  throw new IllegalStateException(error);
                }
                System.out.println("started");
                System.out.println(fake.outcome(token).getStopped().getReason());
              });
      helper.start();
      // What is printed last is waited for: the JVM does not end before its hooks do.
      Runtime.getRuntime()
          .addShutdownHook(
              new Thread(
                  () -> {
                    try {
                      helper.join();
                    } catch (InterruptedException error) {
                      throw new IllegalStateException(error);
                    }
                  }));
      AnarchonClient.builder().fakeSidecar(fake).stopGrace("1h").build().run(job);
    }
  }

  @Test
  void aSignalWaitsForHandlersAndASecondOneCancelsThem() throws Exception {
    Process process =
        new ProcessBuilder(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                "-cp",
                System.getProperty("java.class.path"),
                Application.class.getName())
            .redirectErrorStream(true)
            .start();
    try (BufferedReader lines =
        new BufferedReader(
            new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8))) {
      until(lines, "started");
      process.toHandle().destroy(); // process.destroy() would close its output
      String waits = until(lines, "stopping: waiting up to");
      assertTrue(waits.endsWith("for 1 handler (job); a signal now cancels them"), waits);
      process.toHandle().destroy();
      until(lines, "CANCEL_REASON_SHUTDOWN");
      assertEquals(BY_SIGTERM, process.waitFor());
    } finally {
      process.destroyForcibly();
    }
  }

  private static String until(BufferedReader lines, String words) throws IOException {
    StringBuilder seen = new StringBuilder();
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      if (line.contains(words)) {
        return line;
      }
      seen.append(line).append('\n');
    }
    throw new AssertionError("no \"" + words + "\" in:\n" + seen);
  }
}

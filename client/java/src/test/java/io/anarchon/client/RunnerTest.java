package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;

import io.anarchon.v1.Assignment;
import io.anarchon.v1.Outcome;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

class RunnerTest {
  private static final String TOKEN = "token";

  @Test
  void whatWasToldToStopBeforeItHadAThreadNeverBegins() throws InterruptedException {
    List<String> begun = new ArrayList<>();
    List<Outcome> ended = new ArrayList<>();
    ExecutorService threads = Executors.newSingleThreadExecutor();
    CountDownLatch busy = new CountDownLatch(1);
    threads.execute(
        () -> {
          try {
            busy.await();
          } catch (InterruptedException error) {
            throw new IllegalStateException(error);
          }
        });
    Runner runner =
        new Runner(
            Map.of("job", Job.every("job", "1h").runs(run -> begun.add("begun"))),
            () -> 0,
            new Orders.Trust(Session.NEVER),
            threads,
            (token, outcome) -> ended.add(outcome),
            () -> {},
            token -> {});
    runner.start(Assignment.newBuilder().setToken(TOKEN).setJob("job").build());
    runner.cancel(TOKEN, CancelReason.SUPERSEDED.wire(), "", true);
    busy.countDown();
    threads.shutdown();
    threads.awaitTermination(1, TimeUnit.MINUTES);
    assertEquals(List.of(), begun);
    assertEquals(CancelReason.SUPERSEDED.wire(), ended.get(0).getStopped().getReasonValue());
    assertFalse(runner.isRunning());
  }
}

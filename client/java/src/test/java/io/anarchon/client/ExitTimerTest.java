package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;

class ExitTimerTest {
  private final List<Integer> exits = new ArrayList<>();
  private long now = 100;

  @Test
  void endsTheProcessAtItsTimeByTheClockThatCountsSleep() {
    ExitTimer timer = new ExitTimer(() -> now, exits::add);
    timer.set(60_100);
    now += 60_000; // the machine slept
    timer.run();
    assertEquals(List.of(1), exits);
  }

  @Test
  void waitsForItsTimeWhichMayBecomeSoonerAndNever() throws InterruptedException {
    List<Long> looks = new ArrayList<>();
    Clock clock =
        () -> {
          synchronized (looks) {
            looks.add(now);
            looks.notifyAll();
            return now;
          }
        };
    ExitTimer timer = new ExitTimer(clock, exits::add);
    Thread thread = new Thread(timer::run);
    thread.start();
    synchronized (looks) {
      while (looks.isEmpty()) {
        looks.wait();
      }
    }
    timer.set(1_000_000);
    timer.set(Session.NEVER);
    timer.set(now); // wakes it
    thread.join();
    assertEquals(List.of(1), exits);
  }

  @Test
  void letsGoForGood() throws InterruptedException {
    ExitTimer timer = new ExitTimer(() -> now, exits::add);
    Thread thread = new Thread(timer::run);
    thread.start();
    timer.end();
    thread.join();
    assertTrue(exits.isEmpty());
  }
}

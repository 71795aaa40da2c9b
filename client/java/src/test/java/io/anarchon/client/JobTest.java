package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.anarchon.v1.CronSchedule;
import io.anarchon.v1.JobSpec;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

class JobTest {
  private static final Handler NOTHING = run -> null;

  private static Job.Builder every() {
    return Job.every("job", "1s");
  }

  private static Map<String, String> labels(int count) {
    Map<String, String> labels = new LinkedHashMap<>();
    for (int n = 1; n <= count; n++) {
      labels.put("k" + n, "");
    }
    return labels;
  }

  @Test
  void aJobWithoutAScheduleIsSentWithoutOne() throws Exception {
    JobSpec spec = Job.onTrigger("import").timeout("1m").run(ctx -> "").spec();
    assertEquals(JobSpec.ScheduleCase.SCHEDULE_NOT_SET, spec.getScheduleCase());
    assertFalse(spec.getByName());
    assertTrue(spec.hasTimeout());
  }

  @Test
  void whatIsWrongSaysTheFieldTheValueAndWhatIsRight() {
    Map<Executable, String> cases = new LinkedHashMap<>();
    cases.put(() -> Job.every("bad name", "1s"), "job name \"bad name\": must be 1 to 128 charac");
    cases.put(() -> Job.every("", "1s"), "job name \"\": must be 1 to 128 characters");
    cases.put(() -> Job.byName("a".repeat(129)), "must be 1 to 128 characters");
    cases.put(() -> Job.byName("ä"), "must be 1 to 128 characters of letters, digits");
    cases.put(() -> Job.byName(null), "job name \"null\"");
    cases.put(() -> every().run(null), "job \"job\": handler is null");
    cases.put(() -> every().runs(null), "job \"job\": handler is null");
    cases.put(() -> Job.every("job", "99ms"), "period 99ms: must be 100ms to 52w2d");
    cases.put(() -> Job.every("job", "367d"), "period 52w3d: must be 100ms to 52w2d");
    cases.put(() -> Job.every("job", "1"), "period \"1\": a number needs its unit");
    cases.put(() -> Job.every("job", (String) null), "period null: must be a duration");
    cases.put(() -> Job.every("job", Duration.ofNanos(1)), "must be whole milliseconds");
    cases.put(() -> Job.every("job", Duration.ofMillis(-1)), "cannot be negative");
    cases.put(() -> every().offset("1s"), "offset 1s: must be less than the period 1s");
    cases.put(() -> every().timeout("5"), "timeout \"5\": a number needs its unit");
    cases.put(() -> every().timeout("0s"), "timeout 0s: must be 1ms to 52w2d");
    cases.put(() -> every().lease("2s"), "lease 2s: must be 3s to 1h");
    cases.put(() -> every().startDeadline("1ms"), "startDeadline 1ms: must be 1s to 52w2d");
    cases.put(() -> every().retries(101), "retries 101: must be 0 to 100");
    cases.put(() -> every().retryFactor(Double.NaN), "retryFactor NaN: must be 1 to 100");
    cases.put(() -> every().maxAttempts(0), "maxAttempts 0: must be 1 to 1000");
    cases.put(() -> every().concurrency(10_001), "concurrency 10001: must be 1 to 10000");
    cases.put(() -> every().catchUpLimit(0), "catchUpLimit 0: must be 1 to 10000");
    cases.put(() -> every().labels(labels(17)), "17 labels: must be at most 16");
    cases.put(() -> every().labels(Map.of("k", "v".repeat(129))), "at most 128 bytes each");
    cases.put(() -> every().timeZone("UTC"), "timeZone \"UTC\": is for cron(...)");
    cases.put(() -> Job.cron("job", "0 8 * * *").offset("1s"), "is for every(...)");
    cases.put(() -> Job.cron("job", "0 8 * * *").timeZone("No!"), "must be an IANA name");
    cases.put(() -> Job.cron("job", "@every 10s"), "use Job.every(");
    cases.put(() -> Job.cron("job", "0 8 * *"), "must have five fields, or six with seconds");
    cases.put(() -> Job.cron("job", "0 25 * * *"), "hour is '25': 25 is outside 0 to 23");
    cases.put(() -> Job.cron("job", "0 1-25/2 * * *"), "hour is '1-25/2': 25 is outside 0 to 23");
    cases.put(() -> Job.cron("job", ""), "it has 0");
    cases.put(() -> Job.cron("job", null), "must be a text of at most 1000 characters");
    cases.forEach(JobTest::assertWrong);
  }

  @Test
  void policiesThatContradictEachOtherAreRefusedWhereTheHandlerIsGiven() {
    Map<Job.Builder, String> cases = new LinkedHashMap<>();
    cases.put(every().jitter("1s"), "jitter 1s: must be less than the period, 1s");
    cases.put(
        every().lease("9s").heartbeat("4s"), "heartbeat 4s: must be at most a third of the lease");
    cases.put(every().retryDelay("1s"), "retryDelay without retries: set retries to 1 or more");
    cases.put(
        every().retries(1).retryDelay("2h"), "retryDelay 2h: must be at most retryMaxDelay, 1h");
    cases.put(
        every().catchUp(Job.CatchUp.ALL).overlap(Job.Overlap.CANCEL),
        "catchUp ALL with overlap CANCEL");
    cases.forEach((job, words) -> assertWrong(() -> job.run(NOTHING), words));
  }

  private static void assertWrong(Executable what, String words) {
    String message = assertThrows(AnarchonException.WrongJob.class, what, words).getMessage();
    assertTrue(message.contains(words), () -> message + "; want " + words);
  }

  @Test
  void whatIsNotSaidIsNotSent() {
    JobSpec spec = every().retries(0).offset("0s").run(NOTHING).spec();
    assertFalse(spec.hasRetry() || spec.hasJitter() || spec.hasCatchUp() || spec.hasTimeout());
    assertFalse(spec.getEvery().hasOffset());
    JobSpec named = Job.byName("named").timeout("1m").run(NOTHING).spec();
    assertTrue(named.getByName() && named.hasTimeout());
    assertEquals(JobSpec.ScheduleCase.SCHEDULE_NOT_SET, named.getScheduleCase());
    CronSchedule cron = Job.cron("cron", " @daily ").run(NOTHING).spec().getCron();
    assertEquals("@daily", cron.getExpression());
    assertEquals("UTC", cron.getTimeZone());
  }

  @Test
  void aJobIsNotChangedByWhatItsBuilderDoesLater() {
    Job.Builder builder = every();
    Job first = builder.run(NOTHING);
    builder.timeout("1m").run(NOTHING);
    assertFalse(first.spec().hasTimeout());
  }
}

package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.anarchon.v1.CloseSessionRequest;
import io.anarchon.v1.CloseSessionResponse;
import io.anarchon.v1.CompleteRequest;
import io.anarchon.v1.CompleteResponse;
import io.anarchon.v1.Failure;
import io.anarchon.v1.KeepAliveRequest;
import io.anarchon.v1.KeepAliveResponse;
import io.anarchon.v1.Outcome;
import io.anarchon.v1.SubscribeRequest;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** A whole client with a fake sidecar: what handlers are given, and what becomes of their end. */
class AnarchonClientTest {
  private final FakeSidecar fake = new FakeSidecar();
  private final AnarchonClient client = AnarchonClient.builder().fakeSidecar(fake).build();
  private Subscription subscription;

  /** A subscription that is ready. */
  private void subscribe(Handler handler) throws Exception {
    subscription = client.subscribe(Job.every("job", "1h").run(handler));
    assertEquals("fake", subscription.ready().get());
  }

  @AfterEach
  void stop() {
    if (subscription != null) {
      subscription.stop(Duration.ZERO);
    }
    client.close();
  }

  private Outcome outcomeOf(Handler handler) throws Exception {
    subscribe(handler);
    return fake.outcome(fake.assign("job", "it"));
  }

  private Failure failureOf(Handler handler) throws Exception {
    return outcomeOf(handler).getFailure();
  }

  // ── What handlers return and throw ────────────────────────────────────────────────────────────

  @Test
  void nothingIsAnEmptyResult() throws Exception {
    Outcome outcome = outcomeOf(run -> null);
    assertTrue(outcome.hasSuccess() && outcome.hasElapsed());
    assertEquals("", outcome.getSuccess().getResult());
  }

  @Test
  void aTextIsKeptAsItIs() throws Exception {
    assertEquals("got it", outcomeOf(run -> "got " + run.payloadText()).getSuccess().getResult());
  }

  @Test
  void aValueIsKeptAsJson() throws Exception {
    Map<String, Object> value = new LinkedHashMap<>();
    value.put("rows", 3);
    value.put("name", "Ω \"m\"\n");
    value.put("list", Arrays.asList(1.5, true, null, Double.NaN, List.of()));
    value.put("array", new int[] {1, 2});
    value.put("nulls", new String[] {null});
    value.put("other", Duration.ofSeconds(1));
    assertEquals(
        "{\"rows\": 3, \"name\": \"Ω \\\"m\\\"\\u000a\", \"list\": [1.5, true, null, \"NaN\", []], "
            + "\"array\": [1, 2], \"nulls\": [null], \"other\": \"PT1S\"}",
        outcomeOf(run -> value).getSuccess().getResult());
  }

  @Test
  void aPathIsAText() throws Exception {
    assertEquals("\"a/b\"", outcomeOf(run -> Path.of("a", "b")).getSuccess().getResult());
  }

  @Test
  void aLongTextIsCutBetweenCharacters() throws Exception {
    String result = outcomeOf(run -> "x" + "Ω".repeat(16 << 10)).getSuccess().getResult();
    assertEquals((16 << 10) - 1, result.getBytes(StandardCharsets.UTF_8).length);
  }

  @Test
  void anExceptionFailsTheAttemptInItsOwnWords() throws Exception {
    Failure failure =
        failureOf(
            run -> {
              throw new IOException("Ω".repeat(4_096));
            });
    assertEquals("java.io.IOException", failure.getType());
    assertEquals("Ω".repeat(2_048), failure.getMessage());
    assertTrue(failure.getStackTrace().contains("AnarchonClientTest.java"));
    assertFalse(failure.getPermanent() || failure.hasRetryAfter());
  }

  @Test
  void anErrorOfTheMachinesFailsTheAttempt() throws Exception {
    Failure failure =
        failureOf(
            run -> {
              throw new StackOverflowError();
            });
    assertEquals("java.lang.StackOverflowError", failure.getType());
  }

  @Test
  void anExceptionThatCannotBeShownIsReportedAllTheSame() throws Exception {
    Failure failure =
        failureOf(
            run -> {
              throw new IllegalStateException() {
                private static final long serialVersionUID = 1L;

                @Override
                public String getMessage() {
                  throw new IllegalStateException("broken");
                }
              };
            });
    assertEquals("<an error that cannot be shown>", failure.getMessage());
  }

  @Test
  void aValueThatCannotBeShownFailsTheAttempt() throws Exception {
    Object value =
        new Object() {
          @Override
          public String toString() {
            throw new IllegalStateException("broken");
          }
        };
    assertEquals("broken", failureOf(run -> value).getMessage());
  }

  @Test
  void aRetrySaysWhenAndIsNamedAfterItsCause() throws Exception {
    Failure failure =
        failureOf(
            run -> {
              throw new Retry("again", Duration.ofMinutes(1), new IOException("gone"));
            });
    assertEquals(60, failure.getRetryAfter().getSeconds());
    assertEquals("java.io.IOException", failure.getType());
    assertEquals("again", failure.getMessage());
  }

  @Test
  void aRetryLeavesThePauseToThePolicy() throws Exception {
    Failure failure =
        failureOf(
            run -> {
              throw new Retry("again");
            });
    assertFalse(failure.hasRetryAfter());
    assertEquals("io.anarchon.client.Retry", failure.getType());
  }

  @Test
  void aRetryAfterNonsenseIsAnErrorWhereItIsWritten() {
    assertThrows(AnarchonException.WrongJob.class, () -> new Retry("again", Duration.ZERO));
    assertThrows(AnarchonException.WrongJob.class, () -> new Retry("again", "-1s"));
  }

  @Test
  void aPermanentFailureSaysSo() throws Exception {
    Failure failure =
        failureOf(
            run -> {
              throw new Permanent("", new IOException("gone"));
            });
    assertTrue(failure.getPermanent());
    assertEquals("gone", failure.getMessage());
  }

  @Test
  void anInterruptThatNobodyAskedForIsAFailure() throws Exception {
    Failure failure =
        failureOf(
            run -> {
              throw new InterruptedException("mine");
            });
    assertEquals("java.lang.InterruptedException", failure.getType());
  }

  // ── Cancellation ──────────────────────────────────────────────────────────────────────────────

  @ParameterizedTest
  @EnumSource(mode = EnumSource.Mode.EXCLUDE, names = "OTHER")
  void aHandlerLearnsWhyItIsToStop(CancelReason reason) throws Exception {
    CompletableFuture<CancelledException> seen = new CompletableFuture<>();
    CountDownLatch started = new CountDownLatch(1);
    subscribe(
        run -> {
          started.countDown();
          try {
            new CountDownLatch(1).await();
          } catch (InterruptedException told) {
            seen.complete(assertThrows(CancelledException.class, run::check));
            throw told;
          }
          return null;
        });
    String token = fake.assign("job", "");
    started.await();
    fake.cancel(token, reason);
    CancelledException told = seen.get();
    assertSame(reason, told.reason());
    boolean isLost = reason == CancelReason.LEASE_LOST || reason == CancelReason.FENCED;
    assertEquals(isLost, told instanceof CancelledException.LeaseLost);
    assertEquals(reason == CancelReason.FENCED, told instanceof CancelledException.Fenced);
    assertEquals(reason.wire(), fake.outcome(token).getStopped().getReasonValue());
  }

  @Test
  void whoIsToldToStopAndSucceedsHasSucceeded() throws Exception {
    CountDownLatch started = new CountDownLatch(1);
    subscribe(
        run -> {
          started.countDown();
          assertThrows(CancelledException.class, () -> run.sleep("1h"));
          return "done anyway";
        });
    String token = fake.assign("job", "");
    started.await();
    fake.cancel(token, CancelReason.REQUESTED);
    assertEquals("done anyway", fake.outcome(token).getSuccess().getResult());
  }

  @Test
  void whoIsToldToStopAndThrowsSomethingElseHasFailed() throws Exception {
    CountDownLatch started = new CountDownLatch(1);
    subscribe(
        run -> {
          started.countDown();
          assertThrows(CancelledException.class, () -> run.sleep("1h"));
          throw new IOException("mine");
        });
    String token = fake.assign("job", "");
    started.await();
    fake.cancel(token, CancelReason.REQUESTED);
    assertEquals("mine", fake.outcome(token).getFailure().getMessage());
  }

  @Test
  void confirmChecksAsksAndChecksAgain() throws Exception {
    List<TestRun> runs = new ArrayList<>();
    List<String> asked = new ArrayList<>();
    TestRun run =
        TestRun.builder()
            .confirmation(
                () -> {
                  asked.add("asked");
                  runs.get(0).cancel(CancelReason.REQUESTED);
                })
            .build();
    runs.add(run);
    assertThrows(CancelledException.class, () -> run.context().confirm());
    assertThrows(CancelledException.class, () -> run.context().confirm());
    assertEquals(List.of("asked"), asked);
  }

  @Test
  void confirmAsksTheSidecar() throws Exception {
    CountDownLatch lost = new CountDownLatch(1);
    subscribe(
        run -> {
          if (run.payloadText().equals("wait")) {
            try {
              lost.await();
              run.confirm();
            } catch (InterruptedException told) {
              run.check();
            }
          }
          run.confirm();
          return "confirmed";
        });
    assertEquals("confirmed", fake.outcome(fake.assign("job", "")).getSuccess().getResult());
    String token = fake.assign("job", "wait");
    fake.lose(token);
    lost.countDown();
    assertEquals(CancelReason.FENCED.wire(), fake.outcome(token).getStopped().getReasonValue());
  }

  // ── Streams and sidecars that come and go ─────────────────────────────────────────────────────

  @Test
  void aBrokenStreamIsNotNoticedByARun() throws Exception {
    CountDownLatch started = new CountDownLatch(1);
    CountDownLatch release = new CountDownLatch(1);
    subscribe(
        run -> {
          started.countDown();
          release.await();
          run.check();
          return "done";
        });
    String token = fake.assign("job", "");
    started.await();
    fake.breakStream();
    List<SubscribeRequest> requests = fake.subscribes(2);
    assertEquals(requests.get(0).getSessionId(), requests.get(1).getSessionId());
    assertEquals(List.of(token), requests.get(1).getInFlightList());
    release.countDown();
    assertEquals("done", fake.outcome(token).getSuccess().getResult());
  }

  @Test
  void aResultWaitsForASidecarThatIsAway() throws Exception {
    CountDownLatch release = new CountDownLatch(1);
    subscribe(
        run -> {
          release.await();
          return null;
        });
    String token = fake.assign("job", "");
    fake.goAway();
    release.countDown();
    fake.comeBack();
    assertTrue(fake.outcome(token).hasSuccess());
  }

  // ── Starting and stopping ─────────────────────────────────────────────────────────────────────

  @Test
  void stopHandsARunOverThatDoesNotEndInItsGrace() throws Exception {
    CountDownLatch started = new CountDownLatch(1);
    subscribe(
        run -> {
          started.countDown();
          run.sleep("1h");
          return null;
        });
    String token = fake.assign("job", "");
    started.await();
    subscription.stop("1ms").get();
    assertEquals(CancelReason.SHUTDOWN.wire(), fake.outcome(token).getStopped().getReasonValue());
    assertEquals(subscription.sessionId(), fake.closed().getSessionId());
  }

  @Test
  void whatTheApplicationDoesWhenReadyHoldsUpNoKeepAlive() throws Exception {
    CountDownLatch release = new CountDownLatch(1);
    CountDownLatch blocked = new CountDownLatch(1);
    fake.goAway(); // so that nothing is ready before somebody waits for it
    subscription = client.subscribe(Job.every("job", "1h").run(run -> "ran"));
    CompletableFuture<Void> used =
        subscription
            .ready()
            .thenAccept(
                instance -> {
                  blocked.countDown();
                  try {
                    release.await();
                  } catch (InterruptedException error) {
                    throw new IllegalStateException(error);
                  }
                });
    fake.comeBack();
    blocked.await();
    assertEquals("ran", fake.outcome(fake.assign("job", "")).getSuccess().getResult());
    release.countDown();
    used.get();
  }

  @Test
  void whatTheApplicationDoesWhenItIsNeverReadyMayWaitForTheEnd() throws Exception {
    fake.goAway();
    subscription = client.subscribe(Job.every("job", "1h").run(run -> null));
    CompletableFuture<Void> closed =
        subscription
            .ready()
            .handle((instance, error) -> error)
            .thenAccept(error -> subscription.close());
    subscription.stop().get();
    closed.get();
  }

  @Test
  void aHandlerThatGoesOnAfterTheClientHasStoppedIsToldThatNobodyRenews() throws Exception {
    CountDownLatch started = new CountDownLatch(1);
    CountDownLatch over = new CountDownLatch(1);
    CompletableFuture<CancelledException> seen = new CompletableFuture<>();
    subscription =
        client.subscribe(
            Job.every("job", "1h")
                .cancelGrace("0s")
                .runs(
                    run -> {
                      started.countDown();
                      while (over.getCount() > 0) {
                        Thread.interrupted();
                        Thread.onSpinWait();
                      }
                      seen.complete(assertThrows(CancelledException.class, run::check));
                    }));
    fake.assign("job", "");
    started.await();
    subscription.stop(Duration.ZERO).get();
    over.countDown();
    assertInstanceOf(CancelledException.LeaseLost.class, seen.get());
  }

  @Test
  void readyOfAClientThatIsStoppedBeforeIsAnError() throws Exception {
    fake.goAway();
    subscription = client.subscribe(Job.every("job", "1h").run(run -> null));
    CompletableFuture<String> ready = subscription.ready();
    subscription.close();
    ExecutionException error = assertThrows(ExecutionException.class, ready::get);
    assertEquals("stopped before it was ready", error.getCause().getMessage());
  }

  @Test
  void anInterruptOfRunStopsAndStaysSet() throws Exception {
    CompletableFuture<Boolean> ended = new CompletableFuture<>();
    Thread thread =
        new Thread(
            () -> {
              client.run(Job.every("job", "1h").run(run -> null));
              ended.complete(Thread.currentThread().isInterrupted());
            });
    thread.start();
    fake.keepAlives(1);
    thread.interrupt();
    assertTrue(ended.get());
    assertNotNull(fake.closed());
  }

  @Test
  void anInterruptWhileItClosesEndsTheGrace() throws Exception {
    CountDownLatch started = new CountDownLatch(1);
    subscribe(
        run -> {
          started.countDown();
          run.sleep("1h");
          return null;
        });
    String token = fake.assign("job", "");
    started.await();
    Thread.currentThread().interrupt();
    subscription.close();
    assertTrue(Thread.interrupted());
    assertTrue(fake.outcome(token).hasStopped());
  }

  // ── An error that ends the client is told to somebody ─────────────────────────────────────────

  /** A sidecar that refuses. */
  private static final class Refusing implements Transport {
    @Override
    public Runnable subscribe(SubscribeRequest request, Events events) {
      events.ended(new AnarchonException.Refused("jobs[0]: no", ""));
      return () -> {};
    }

    @Override
    public void keepAlive(KeepAliveRequest call, long timeout, Answer<KeepAliveResponse> answer) {
      throw new AssertionError();
    }

    @Override
    public void complete(CompleteRequest call, long timeout, Answer<CompleteResponse> answer) {
      throw new AssertionError();
    }

    @Override
    public void closeSession(
        CloseSessionRequest call, long timeout, Answer<CloseSessionResponse> answer) {
      throw new AssertionError();
    }

    @Override
    public void close() {}
  }

  /** What is logged until it is refused. */
  private static String loggedWhileRefused(List<CompletableFuture<?>> asked, boolean isAsked)
      throws InterruptedException {
    PrintStream before = System.err;
    ByteArrayOutputStream log = new ByteArrayOutputStream();
    System.setErr(new PrintStream(log, true, StandardCharsets.UTF_8));
    try {
      CountDownLatch go = new CountDownLatch(1);
      Job job = Job.every("job", "1h").run(run -> null);
      Subscription subscription =
          new Subscription(
              SubscribeRequest.newBuilder().addJobs(job.spec()).build(),
              Map.of("job", job),
              new Refusing(),
              () -> {
                waitFor(go); // the loop begins when the test has asked
                return 0;
              },
              () -> 0.5,
              Duration.ZERO,
              false);
      if (isAsked) {
        asked.add(subscription.closed());
      }
      go.countDown();
      while (!subscription.isOver()) {
        Thread.onSpinWait();
      }
      AnarchonException told = assertThrows(AnarchonException.Refused.class, subscription::await);
      assertEquals("jobs[0]: no", told.getMessage());
      return log.toString(StandardCharsets.UTF_8);
    } finally {
      System.setErr(before);
    }
  }

  private static void waitFor(CountDownLatch latch) {
    try {
      latch.await();
    } catch (InterruptedException error) {
      throw new IllegalStateException(error);
    }
  }

  @Test
  void anErrorThatNobodyAskedForIsLogged() throws Exception {
    assertTrue(
        loggedWhileRefused(new ArrayList<>(), false).contains("the client stops: jobs[0]: no"));
  }

  @Test
  void anErrorThatSomebodyAskedForIsNotLogged() throws Exception {
    List<CompletableFuture<?>> asked = new ArrayList<>();
    assertEquals("", loggedWhileRefused(asked, true));
    ExecutionException error = assertThrows(ExecutionException.class, asked.get(0)::get);
    assertInstanceOf(AnarchonException.Refused.class, error.getCause());
  }

  // ── What is set up wrongly ────────────────────────────────────────────────────────────────────

  @Test
  void settingsThatAreWrongAreRefused() {
    AnarchonClient.Builder builder = AnarchonClient.builder();
    for (int wrong : new int[] {0, 10_001}) {
      AnarchonException error =
          assertThrows(AnarchonException.WrongSetup.class, () -> builder.maxConcurrency(wrong));
      assertEquals("maxConcurrency " + wrong + ": must be 1 to 10000", error.getMessage());
    }
    assertThrows(AnarchonException.WrongSetup.class, () -> builder.stopGrace("1.5s"));
    assertThrows(AnarchonException.WrongSetup.class, () -> builder.stopGrace(Duration.ofNanos(1)));
    assertThrows(AnarchonException.WrongSetup.class, () -> builder.tokenFile("/nowhere").build());
  }

  @Test
  void jobsOfOneNameAndNoJobsAreRefused() {
    Job job = Job.byName("job").run(run -> null);
    AnarchonException error =
        assertThrows(AnarchonException.WrongJob.class, () -> client.subscribe(job, job));
    assertEquals("two jobs are named \"job\": give one of them another name", error.getMessage());
    error = assertThrows(AnarchonException.WrongJob.class, () -> client.subscribe());
    assertEquals("0 jobs given: must be 1 to 10000", error.getMessage());
  }

  @Test
  void aSubscribeRequestThatNoSidecarWouldTakeIsRefusedBeforeItIsSent() {
    Map<String, String> labels = new LinkedHashMap<>();
    for (int n = 0; n < 16; n++) {
      labels.put(String.format("%0128d", n), "v".repeat(128));
    }
    Job[] jobs = new Job[1_100];
    for (int n = 0; n < jobs.length; n++) {
      jobs[n] = Job.every("job-" + n, "1h").labels(labels).run(run -> null);
    }
    AnarchonException error =
        assertThrows(AnarchonException.Refused.class, () -> client.subscribe(jobs));
    assertTrue(error.getMessage().contains("split the jobs between clients"));
  }

  // ── A run for tests ───────────────────────────────────────────────────────────────────────────

  @Test
  void aRunForTestsIsWhatAHandlerIsGiven() throws Exception {
    TestRun test =
        TestRun.builder()
            .job("sync")
            .payload("p")
            .timeout(Duration.ofHours(1))
            .trigger(RunContext.Trigger.MANUAL)
            .build();
    RunContext run = test.context();
    assertEquals("sync 1791633610000 attempt 1", run.toString());
    assertEquals("2026-10-10T12:00:10Z", run.scheduledAt().toString());
    assertSame(RunContext.Trigger.MANUAL, run.trigger());
    assertEquals(1_791_633_610_000_000L, run.fence());
    assertTrue(run.remaining().orElseThrow().compareTo(Duration.ofHours(1)) <= 0);
    assertTrue(run.deadline().isPresent());
    run.confirm();
    assertEquals("p", test.call(RunContext::payloadText));
    test.cancel(CancelReason.FENCED);
    assertTrue(run.isCancelled());
    assertThrows(CancelledException.Fenced.class, run::confirm);
    RunContext other =
        TestRun.builder()
            .confirmation(
                () -> {
                  throw TestRun.notConfirmed("away");
                })
            .build()
            .context();
    assertThrows(AnarchonException.NotConfirmed.class, other::confirm);
    assertTrue(other.remaining().isEmpty() && other.deadline().isEmpty());
  }
}

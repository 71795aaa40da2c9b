package io.anarchon.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Timestamp;
import io.anarchon.v1.Assignment;
import io.anarchon.v1.Assignments;
import io.anarchon.v1.Attached;
import io.anarchon.v1.CancelReason;
import io.anarchon.v1.Cancellation;
import io.anarchon.v1.CompleteResponse;
import io.anarchon.v1.KeepAliveResponse;
import io.anarchon.v1.Outcome;
import io.anarchon.v1.Receipt;
import io.anarchon.v1.ReceiptStatus;
import io.anarchon.v1.SubscribeRequest;
import io.anarchon.v1.SubscribeResponse;
import io.anarchon.v1.Success;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.function.Consumer;
import org.junit.jupiter.api.Test;

/** The session in virtual time: every rule of the specification, alone. */
class SessionTest {
  private static final int NO_STREAM = -1;
  private static final CancelReason LEASE_LOST = CancelReason.CANCEL_REASON_LEASE_LOST;
  private static final CancelReason FENCED = CancelReason.CANCEL_REASON_FENCED;
  private static final CancelReason TIMEOUT = CancelReason.CANCEL_REASON_TIMEOUT;
  private static final CancelReason REQUESTED = CancelReason.CANCEL_REASON_REQUESTED;
  private static final CancelReason SHUTDOWN = CancelReason.CANCEL_REASON_SHUTDOWN;
  private static final ReceiptStatus RECORDED = ReceiptStatus.RECEIPT_STATUS_RECORDED;

  /** Drives one session. */
  private static final class Play {
    final Session session;
    long now = 1_000_000;
    List<Session.Command> out = List.of(); // of the last fact

    Play(Job... jobs) {
      SubscribeRequest.Builder request =
          SubscribeRequest.newBuilder().setSessionId("session").setMaxConcurrency(2);
      for (Job job : jobs.length == 0 ? new Job[] {job("job")} : jobs) {
        request.addJobs(job.spec());
      }
      session = new Session(request.build(), () -> 0.5);
    }

    Play take(Session.Fact fact) {
      out = session.handle(now, fact);
      return this;
    }

    /** Lets time pass, with every tick that the session asks for on the way. */
    Play after(long wait) {
      final long end = now + wait;
      List<Session.Command> all = new ArrayList<>();
      while (session.wakeAt() <= end) {
        now = Math.max(now, session.wakeAt());
        all.addAll(take(new Session.Tick()).out);
      }
      now = end;
      assertEquals(List.of(), take(new Session.Tick()).out, "it did not ask to be woken");
      out = all;
      return this;
    }

    Play event(SubscribeResponse.Builder event) {
      return take(new Session.StreamEvent(session.stream(), event.build()));
    }

    Play attach() {
      return event(attached(Duration.ofSeconds(15)));
    }

    /** Answers the newest keep-alive. */
    Play answer(Consumer<KeepAliveResponse.Builder> change) {
      KeepAliveResponse.Builder response =
          KeepAliveResponse.newBuilder()
              .setSessionTtl(Durations.toWire(Duration.ofSeconds(15)))
              .setStreamOpen(true);
      change.accept(response);
      return take(new Session.KeepAliveAnswered(session.keepAlives(), response.build()));
    }

    Play answer() {
      return answer(response -> {});
    }

    /** A session that is attached and trusted. */
    Play begin() {
      return take(new Session.Start()).attach().answer();
    }

    Play assign(String token) {
      return assign(assignment(token).build());
    }

    Play assign(Assignment assignment) {
      return event(
          SubscribeResponse.newBuilder()
              .setRuns(Assignments.newBuilder().addAssignments(assignment)));
    }

    Play cancel(String token, CancelReason reason) {
      return event(SubscribeResponse.newBuilder().setCancel(cancellation(token, reason)));
    }

    Play end(String token) {
      Outcome success = Outcome.newBuilder().setSuccess(Success.getDefaultInstance()).build();
      return take(new Session.HandlerEnded(token, success));
    }

    Play endStream() {
      return take(new Session.StreamEnded(session.stream(), unavailable()));
    }

    Play receipts(ReceiptStatus... statuses) {
      CompleteResponse.Builder response = CompleteResponse.newBuilder();
      for (ReceiptStatus status : statuses) {
        response.addReceipts(Receipt.newBuilder().setStatus(status));
      }
      List<String> sent = one(Session.SendResults.class).tokens();
      return take(new Session.ResultsAnswered(sent, response.build()));
    }

    <C> List<C> all(Class<C> kind) {
      return out.stream().filter(kind::isInstance).map(kind::cast).toList();
    }

    <C> C one(Class<C> kind) {
      assertEquals(1, all(kind).size(), () -> kind + " in " + out);
      return all(kind).get(0);
    }

    void none(Class<?> kind) {
      assertEquals(List.of(), all(kind));
    }

    void said(String words) {
      assertTrue(
          all(Session.Say.class).stream().anyMatch(it -> it.message().contains(words)),
          () -> "\"" + words + "\" in " + out);
    }
  }

  private static Job job(String name) {
    return Job.every(name, "1s").runs(run -> {});
  }

  private static Assignment.Builder assignment(String token) {
    return Assignment.newBuilder().setToken(token).setJob("job").setSlot(5).setAttempt(1);
  }

  private static Cancellation cancellation(String token, CancelReason reason) {
    return Cancellation.newBuilder().setToken(token).setReason(reason).build();
  }

  private static SubscribeResponse.Builder attached(Duration ttl) {
    return SubscribeResponse.newBuilder()
        .setAttached(
            Attached.newBuilder()
                .setInstanceId("one")
                .setKeepAliveInterval(Durations.toWire(Duration.ofSeconds(5)))
                .setSessionTtl(Durations.toWire(ttl)));
  }

  private static Consumer<KeepAliveResponse.Builder> ttl(long millis) {
    return response -> response.setSessionTtl(Durations.toWire(Duration.ofMillis(millis)));
  }

  private static Consumer<KeepAliveResponse.Builder> interval(long millis) {
    return response -> response.setKeepAliveInterval(Durations.toWire(Duration.ofMillis(millis)));
  }

  private static AnarchonException.Sidecar unavailable() {
    return new AnarchonException.Unavailable("gone", "");
  }

  private static AnarchonException.Sidecar error(Status.Code code, String reason) {
    return AnarchonException.ofStatus(code, reason, "no");
  }

  private static AnarchonException.Sidecar sessionNotFound() {
    return error(Status.Code.NOT_FOUND, "SESSION_NOT_FOUND");
  }

  // ── Attaching and trust ───────────────────────────────────────────────────────────────────────

  @Test
  void attachingSendsAKeepAliveAtOnceAndIsReadyWithItsAnswer() {
    Play play = new Play().take(new Session.Start());
    SubscribeRequest request = play.one(Session.OpenStream.class).request();
    assertEquals("session", request.getSessionId());
    assertEquals(1, request.getJobsCount());
    play.none(Session.SendKeepAlive.class);
    Session.SendKeepAlive sent = play.attach().one(Session.SendKeepAlive.class);
    assertEquals("session", sent.request().getSessionId());
    assertEquals(5_000, sent.timeout());
    play.none(Session.Ready.class);
    assertEquals(0, play.session.trustEnd(), "attaching extends no trust");
    assertEquals("one", play.answer().one(Session.Ready.class).instanceId());
    play.after(5_000).one(Session.SendKeepAlive.class);
  }

  @Test
  void anAnswerThatKnowsNoStreamOfOursMakesNothingReady() {
    Play play = new Play().take(new Session.Start()).attach();
    play.answer(response -> response.setStreamOpen(false)).none(Session.Ready.class);
  }

  @Test
  void nothingIsStartedBeforeThereIsTrust() {
    Play play = new Play().take(new Session.Start()).attach().assign("a");
    play.none(Session.StartHandler.class);
    assertEquals("a", play.answer().one(Session.StartHandler.class).assignment().getToken());
  }

  @Test
  void trustCountsFromTheSending() {
    Play play = new Play().begin().after(5_000);
    long sentAt = play.now;
    play.after(4_000).answer();
    assertEquals(sentAt + 15_000, play.session.trustEnd());
  }

  @Test
  void atTheEndOfTrustEveryAttemptIsLostWhateverWasAnsweredMeanwhile() {
    Play play = new Play().begin().assign("a").after(5_000);
    play.now += 10_000; // the process stood still; the answer waited in a buffer
    Session.CancelHandler cancel = play.answer().one(Session.CancelHandler.class);
    assertEquals("a", cancel.token());
    assertEquals(LEASE_LOST.getNumber(), cancel.reason());
    assertFalse(cancel.trusted());
    play.said("no keep-alive was sent for at least");
    play.after(1_000).assign("b").one(Session.StartHandler.class); // regained, for new attempts
    play.after(1_000).none(Session.CancelHandler.class);
  }

  @Test
  void trustMayShrinkToNothing() {
    Play play = new Play().begin().assign("a").after(5_000);
    assertFalse(play.answer(ttl(0)).one(Session.CancelHandler.class).trusted());
  }

  @Test
  void onlyTheNewestAnsweredKeepAliveCounts() {
    Play play = new Play().begin().after(5_000);
    int older = play.session.keepAlives();
    long end = play.after(5_000).answer().session.trustEnd();
    KeepAliveResponse late =
        KeepAliveResponse.newBuilder()
            .setSessionTtl(Durations.toWire(Duration.ofMillis(1)))
            .setStreamOpen(true)
            .build();
    play.take(new Session.KeepAliveAnswered(older, late));
    assertEquals(end, play.session.trustEnd());
  }

  @Test
  void onlyASidecarThatWeAreAttachedToExtendsTrust() {
    Play play = new Play().begin().assign("a");
    long end = play.session.trustEnd();
    play.endStream().after(5_000).answer();
    assertEquals(end, play.session.trustEnd(), "extended without a stream");
    play.attach().answer(response -> response.setStreamOpen(false));
    assertTrue(play.session.trustEnd() <= end, "extended by one that does not know the stream");
  }

  @Test
  void attachingAgainShortensTrust() {
    Play play = new Play().begin().assign("a");
    play.take(new Session.StreamEnded(NO_STREAM, unavailable())); // no stream of ours
    play.endStream().after(100).event(attached(Duration.ofSeconds(2)));
    assertEquals(play.now + 2_000, play.session.trustEnd());
  }

  // ── Streams ───────────────────────────────────────────────────────────────────────────────────

  @Test
  void aLostStreamIsOpenedAgainWithWhatIsInFlight() {
    Play play = new Play().begin().assign("a").assign("b").end("b").endStream();
    play.said("gone; subscribing again until that succeeds");
    play.none(Session.CancelHandler.class);
    play.after(75); // 100 ms, drawn at the middle of its upper half
    assertEquals(List.of("a", "b"), play.one(Session.OpenStream.class).request().getInFlightList());
  }

  @Test
  void thePausesDoubleUpTo5sAndBeginAnewAfterAnAnsweredKeepAlive() {
    Play play = new Play().take(new Session.Start());
    for (long pause : new long[] {75, 150, 300, 600, 1_200, 2_400, 3_750, 3_750}) {
      play.endStream();
      assertEquals(pause, play.session.openAt() - play.now);
      play.after(pause).one(Session.OpenStream.class);
    }
    play.attach().answer().endStream();
    assertEquals(75, play.session.openAt() - play.now);
  }

  @Test
  void anUnknownSessionIsSubscribedAgainAndTrustGoesOnToItsEnd() {
    Play play = new Play().begin().assign("a").after(5_000);
    play.take(new Session.KeepAliveFailed(play.session.keepAlives(), sessionNotFound()));
    play.none(Session.CancelHandler.class);
    play.after(75).one(Session.OpenStream.class);
    play.none(Session.SendKeepAlive.class);
    play.after(15_000).none(Session.SendKeepAlive.class);
    assertEquals(LEASE_LOST.getNumber(), play.one(Session.CancelHandler.class).reason());
  }

  @Test
  void eventsOfAnEarlierStreamAreNotHeard() {
    Play play = new Play().begin();
    int old = play.session.stream();
    play.endStream().after(75);
    play.take(new Session.StreamEvent(old, attached(Duration.ofSeconds(15)).build()));
    assertEquals(Session.State.SUBSCRIBING, play.session.state());
  }

  @Test
  void anUnknownEventChangesNothing() {
    assertEquals(List.of(), new Play().begin().event(SubscribeResponse.newBuilder()).out);
  }

  @Test
  void theIntervalOfAnAnswerCountsFromTheSendingAndIsNeverBelow200Ms() {
    Play play = new Play().begin().after(5_000);
    long sentAt = play.now;
    play.after(300).answer(interval(1_000));
    assertEquals(sentAt + 1_000, play.session.wakeAt());
    play.after(1_000).answer(interval(1));
    play.after(199).none(Session.SendKeepAlive.class);
    play.after(1).one(Session.SendKeepAlive.class);
  }

  // ── Assignments and cancellation ──────────────────────────────────────────────────────────────

  @Test
  void anAssignmentThatComesAgainIsDropped() {
    Play play = new Play().begin().assign("a");
    play.one(Session.StartHandler.class);
    play.assign("a").none(Session.StartHandler.class);
    play.end("a").assign("a").none(Session.StartHandler.class);
    play.after(1).assign("a").none(Session.StartHandler.class);
  }

  @Test
  void oneThatFindsNoRoomIsDroppedAndNotRemembered() {
    Play play = new Play().begin().assign("a").assign("b");
    play.assign("c").none(Session.StartHandler.class);
    play.end("a").none(Session.StartHandler.class);
    play.assign("c").one(Session.StartHandler.class);
  }

  @Test
  void aRunOfAJobThatWeDoNotHaveIsLoggedAndNotAccepted() {
    Play play = new Play().begin().assign(assignment("a").setJob("other").build());
    play.none(Session.StartHandler.class);
    play.said("a run of \"other\", which we do not have");
    assertEquals(List.of(), play.session.inFlight());
  }

  @Test
  void theFirstReasonStaysAndTheEndOfTrustIsToldAgain() {
    Play play = new Play().begin().assign("a");
    Session.CancelHandler first = play.cancel("a", TIMEOUT).one(Session.CancelHandler.class);
    assertTrue(first.trusted());
    assertEquals(TIMEOUT.getNumber(), first.reason());
    play.cancel("a", REQUESTED).none(Session.CancelHandler.class);
    assertFalse(play.cancel("a", FENCED).one(Session.CancelHandler.class).trusted());
    play.cancel("a", LEASE_LOST).none(Session.CancelHandler.class);
    play.cancel("gone", TIMEOUT).none(Session.CancelHandler.class);
  }

  @Test
  void whatIsHeldAndGetsCancelledIsReportedStopped() {
    Play play = new Play().take(new Session.Start()).attach().assign("a").cancel("a", REQUESTED);
    Outcome outcome = play.one(Session.SendResults.class).request().getResults(0).getOutcome();
    assertEquals(REQUESTED, outcome.getStopped().getReason());
    assertTrue(outcome.hasElapsed());
    play.answer().none(Session.StartHandler.class);
  }

  @Test
  void aLostAttemptIsCancelledForTheReasonGiven() {
    Play play = new Play().begin().assign("a").assign("b").after(5_000);
    play.answer(
        response ->
            response
                .addLost(cancellation("a", FENCED))
                .addLost(cancellation("b", CancelReason.CANCEL_REASON_UNSPECIFIED)));
    List<Session.CancelHandler> told = play.all(Session.CancelHandler.class);
    assertEquals(
        List.of(FENCED.getNumber(), LEASE_LOST.getNumber()),
        told.stream().map(Session.CancelHandler::reason).toList());
    assertTrue(told.stream().noneMatch(Session.CancelHandler::trusted));
  }

  @Test
  void whatWaitsIsDroppedWithItsStreamAndWhereAKeepAliveFailsAndMayComeAgain() {
    Play play = new Play().take(new Session.Start()).attach().assign("a");
    play.take(new Session.KeepAliveFailed(play.session.keepAlives(), unavailable()));
    play.after(5_000).answer().none(Session.StartHandler.class);
    play.assign("a").one(Session.StartHandler.class);
    play = new Play().take(new Session.Start()).attach().assign("a").endStream();
    play.after(75).attach().answer().none(Session.StartHandler.class);
  }

  @Test
  void tokensAreRememberedForMaxConcurrencyAnd1024More() {
    Play play = new Play().begin();
    for (int i = 0; i < 2 + 1_024; i++) {
      play.assign("t" + i).one(Session.StartHandler.class);
      play.end("t" + i).receipts(RECORDED);
    }
    play.assign("t0").none(Session.StartHandler.class);
    play.assign("one more").assign("t0").one(Session.StartHandler.class);
  }

  @Test
  void whatWasCancelledBeforeItStartedDoesNotStartWhenItComesAgain() {
    Play play = new Play().take(new Session.Start()).attach().assign("a");
    play.cancel("a", REQUESTED).receipts(RECORDED);
    play.answer().assign("a").none(Session.StartHandler.class);
  }

  @Test
  void runsThatComeBeforeAttachedAreNotHeard() {
    Play play = new Play().take(new Session.Start()).assign("a");
    play.attach().answer().none(Session.StartHandler.class);
  }

  @Test
  void whatAnOlderAnswerNamesAsLostCountsToo() {
    Play play = new Play().begin().assign("a").after(5_000);
    int older = play.session.keepAlives();
    play.after(5_000).answer();
    KeepAliveResponse response =
        KeepAliveResponse.newBuilder().addLost(cancellation("a", FENCED)).build();
    play.take(new Session.KeepAliveAnswered(older, response));
    assertEquals(FENCED.getNumber(), play.one(Session.CancelHandler.class).reason());
  }

  // ── Results ───────────────────────────────────────────────────────────────────────────────────

  @Test
  void resultsThatEndMeanwhileGoTogetherOneCallAtATime() {
    Play play = new Play().begin().assign("a").assign("b").end("a");
    List<String> first = play.one(Session.SendResults.class).tokens();
    play.end("b").none(Session.SendResults.class);
    Receipt recorded = Receipt.newBuilder().setStatus(RECORDED).build();
    play.take(
        new Session.ResultsAnswered(
            first, CompleteResponse.newBuilder().addReceipts(recorded).build()));
    assertEquals(List.of("b"), play.one(Session.SendResults.class).tokens());
    play.receipts(RECORDED);
    assertEquals(List.of(), play.session.inFlight());
  }

  @Test
  void aResultIsRepeatedUntilItHasAReceipt() {
    Play play = new Play().begin().assign("a").end("a");
    play.receipts(ReceiptStatus.RECEIPT_STATUS_STORE_UNAVAILABLE);
    play.none(Session.SendResults.class);
    CompleteResponse unknown =
        CompleteResponse.newBuilder().addReceipts(Receipt.newBuilder().setStatusValue(99)).build();
    play.after(75).take(new Session.ResultsAnswered(List.of("a"), unknown));
    play.after(150).one(Session.SendResults.class);
    play.take(new Session.ResultsFailed(List.of("a"), unavailable()));
    play.after(300).receipts(); // none at all
    play.after(600).receipts(RECORDED);
    play.after(1_000).none(Session.SendResults.class);
  }

  @Test
  void aResultThatDidNotCountIsAWarning() {
    Play play = new Play().begin().assign("a").end("a");
    play.receipts(ReceiptStatus.RECEIPT_STATUS_FENCED);
    play.said("the result of job 5 attempt 1 did not count: its attempt no longer held the lease");
    play.after(1_000).none(Session.SendResults.class);
  }

  @Test
  void aRefusedBatchGoesAgainOneByOne() {
    Play play = new Play().begin().assign("a").assign("b").end("a").end("b");
    play.take(new Session.ResultsFailed(List.of("a"), unavailable())).after(100);
    final AnarchonException.Sidecar refused = error(Status.Code.INVALID_ARGUMENT, "");
    play.take(new Session.ResultsFailed(List.of("a", "b"), refused));
    assertEquals(List.of("a"), play.one(Session.SendResults.class).tokens());
    play.take(new Session.ResultsFailed(List.of("a"), refused));
    play.said("is refused: no");
    play.receipts(RECORDED);
    assertEquals(List.of(), play.session.inFlight());
  }

  @Test
  void aResultIsGivenUpAfter5MinutesOrItsLease() {
    Map<Long, Long> byLease =
        Map.of(30_000L, 300_000L, 1_200_000L, 1_200_000L, 10_800_000L, 3_600_000L);
    byLease.forEach(
        (lease, kept) -> {
          Timestamp leaseEnd = Timestamp.newBuilder().setSeconds(lease / 1_000).build();
          Assignment whole = assignment("a").setSlot(0).setLeaseEndTime(leaseEnd).build();
          Play play = new Play().begin().assign(whole);
          play.after(7).end("a"); // never answered; and no keep-alive wakes it just then
          play.after(kept - 1);
          assertEquals(List.of("a"), play.session.inFlight(), () -> "given up early: " + lease);
          play.after(1).said("and is given up");
        });
  }

  @Test
  void aResultIsRepeatedAfterPausesThatDouble() {
    Play play = new Play().begin().assign("a").end("a");
    for (long pause : new long[] {75, 150, 300, 600, 1_200, 2_400, 3_750, 3_750}) {
      play.take(new Session.ResultsFailed(List.of("a"), unavailable()));
      play.after(pause - 1).none(Session.SendResults.class);
      play.after(1).one(Session.SendResults.class);
    }
  }

  @Test
  void aBatchEndsAt1000ResultsAndAt2MiB() {
    Play play = new Play().take(new Session.Start()).attach();
    for (int i = 0; i < 1_002; i++) {
      play.assign("t" + i);
    }
    for (int i = 0; i < 1_002; i++) {
      play.cancel("t" + i, REQUESTED); // the first goes at once, alone
    }
    CompleteResponse recorded =
        CompleteResponse.newBuilder().addReceipts(Receipt.newBuilder().setStatus(RECORDED)).build();
    play.take(new Session.ResultsAnswered(List.of("t0"), recorded));
    assertEquals(1_000, play.one(Session.SendResults.class).tokens().size());

    play = new Play().begin().assign("a").assign("b").end("a");
    String half = "x".repeat(Session.RESULTS_MAX_BYTES / 2);
    Outcome large = Outcome.newBuilder().setSuccess(Success.newBuilder().setResult(half)).build();
    play.take(new Session.HandlerEnded("b", large)).assign("c");
    play.take(new Session.HandlerEnded("c", large));
    play.take(new Session.ResultsAnswered(List.of("a"), recorded));
    assertEquals(List.of("b"), play.one(Session.SendResults.class).tokens());
  }

  @Test
  void whatWasRefusedWithOthersJoinsNoneAndNoneJoinsIt() {
    final AnarchonException.Sidecar refused = error(Status.Code.INVALID_ARGUMENT, "");
    Play play = new Play().begin().assign("c").end("c").assign("a").assign("b");
    play.end("a").end("b").take(new Session.ResultsFailed(List.of("c"), unavailable()));
    assertEquals(List.of("a", "b"), play.one(Session.SendResults.class).tokens());
    play.after(75).take(new Session.ResultsFailed(List.of("a", "b"), refused));
    assertEquals(List.of("c"), play.one(Session.SendResults.class).tokens());
    play.receipts(RECORDED);
    assertEquals(List.of("a"), play.one(Session.SendResults.class).tokens());
    play.assign("d").end("d").take(new Session.ResultsFailed(List.of("a"), unavailable()));
    assertEquals(List.of("b"), play.one(Session.SendResults.class).tokens());
  }

  // ── Leaving ───────────────────────────────────────────────────────────────────────────────────

  @Test
  void leavingWaitsForTheGraceThenCancelsThenCloses() {
    Play play = new Play(job("job"), Job.every("brief", "1s").stopGrace("1s").runs(run -> {}));
    play.begin().assign("a").assign(assignment("b").setJob("brief").build());
    play.take(new Session.StopAsked(20_000, ""));
    assertTrue(play.one(Session.SendKeepAlive.class).request().getDraining());
    play.said("stopping: waiting up to 20s for 2 handlers (brief, job)");
    Session.CancelHandler cancel = play.answer().after(1_000).one(Session.CancelHandler.class);
    assertEquals("b", cancel.token());
    assertEquals(SHUTDOWN.getNumber(), cancel.reason());
    assertTrue(cancel.trusted());
    play.assign("c").none(Session.StartHandler.class);
    play.take(new Session.HandlerEnded("b", Session.stopped(SHUTDOWN.getNumber())));
    play.receipts(RECORDED).end("a").receipts(RECORDED);
    assertEquals(List.of("c"), play.one(Session.SendClose.class).request().getStoppedList());
    assertNull(play.take(new Session.CloseEnded()).one(Session.Closed.class).error());
    assertEquals(Session.NEVER, play.session.wakeAt());
  }

  @Test
  void aSecondStopCanOnlyShortenTheGrace() {
    Play play = new Play().begin().assign("a");
    play.take(new Session.StopAsked(10_000, "")).take(new Session.StopAsked(60_000, ""));
    play.after(9_999).none(Session.CancelHandler.class);
    play.after(1).one(Session.CancelHandler.class);
    play = new Play().begin().assign("a").take(new Session.StopAsked(10_000, ""));
    play.take(new Session.StopAsked(0, "")).one(Session.CancelHandler.class);
  }

  @Test
  void aHandlerThatDoesNotStopIsLeftToItsLease() {
    Play play = new Play().begin().assign("a").take(new Session.StopAsked(0, "")).answer();
    play.after(4_999).none(Session.SendClose.class);
    play.after(1).said("handlers that did not stop are left to their leases: job 5 attempt 1");
    assertEquals(0, play.one(Session.SendClose.class).request().getStoppedCount());
  }

  @Test
  void aJobHasACancelGraceOfItsOwnAndNoLongerStopGraceThanTheClients() {
    Play play = new Play(Job.every("job", "1s").cancelGrace("9s").stopGrace("1m").runs(run -> {}));
    play.begin().assign("a").take(new Session.StopAsked(10_000, ""));
    for (int seconds = 0; seconds < 10; seconds += 5) {
      play.answer().none(Session.CancelHandler.class);
      play.after(5_000);
    }
    play.one(Session.CancelHandler.class);
    play.answer().after(5_000).answer().after(3_999).none(Session.SendClose.class);
    play.after(1).one(Session.SendClose.class);
  }

  @Test
  void whatSurelyStoppedWithoutAReceiptIsNamedOnClosing() {
    Play play = new Play().begin().assign("a").assign("b").take(new Session.StopAsked(0, ""));
    play.take(new Session.HandlerEnded("a", Session.stopped(SHUTDOWN.getNumber()))).end("b");
    play.answer().after(5_000).said("the result of job 5 attempt 1 could not be reported");
    assertEquals(List.of("a"), play.one(Session.SendClose.class).request().getStoppedList());
  }

  @Test
  void theFirstErrorStaysAndNothingIsOpenedOrRenewedAfterIt() {
    Play play = new Play().begin().assign("a").after(5_000);
    play.take(
        new Session.KeepAliveFailed(
            play.session.keepAlives(), error(Status.Code.INVALID_ARGUMENT, "")));
    play.none(Session.SendKeepAlive.class);
    play.take(new Session.StreamEnded(1, unavailable()));
    play.after(4_000).none(Session.OpenStream.class);
    play.take(
        new Session.StreamEnded(
            play.session.stream(), error(Status.Code.FAILED_PRECONDITION, "UNSUPPORTED")));
    play.end("a").receipts(RECORDED).one(Session.SendClose.class);
    AnarchonException told = play.take(new Session.CloseEnded()).one(Session.Closed.class).error();
    assertEquals(AnarchonException.Refused.class, told.getClass());
  }

  @Test
  void aRequestThatNoSidecarWouldTakeIsNotSent() {
    SubscribeRequest large =
        SubscribeRequest.newBuilder().setSessionId("x".repeat(Session.MESSAGE_MAX_BYTES)).build();
    List<Session.Command> done = new Session(large, () -> 0.5).handle(0, new Session.Start());
    Session.Closed closed = (Session.Closed) done.get(done.size() - 1);
    AnarchonException.Refused told =
        assertInstanceOf(AnarchonException.Refused.class, closed.error());
    assertEquals("LIMIT_EXCEEDED", told.reason());
    assertTrue(done.stream().noneMatch(Session.OpenStream.class::isInstance));
  }

  @Test
  void aSessionThatWasNeverAttachedIsNotClosed() {
    Play play = new Play().take(new Session.Start()).take(new Session.StopAsked(0, ""));
    play.none(Session.SendClose.class);
    play.one(Session.Closed.class);
  }

  @Test
  void whatTheSidecarRefusesEndsTheSession() {
    Play play = new Play().take(new Session.Start());
    play.take(new Session.StreamEnded(1, error(Status.Code.INVALID_ARGUMENT, "")));
    assertInstanceOf(AnarchonException.Refused.class, play.one(Session.Closed.class).error());
    play = new Play().begin().assign("a");
    play.take(new Session.StreamEnded(1, error(Status.Code.FAILED_PRECONDITION, "UNSUPPORTED")));
    assertEquals(SHUTDOWN.getNumber(), play.one(Session.CancelHandler.class).reason());
    play.after(4_000).none(Session.SendKeepAlive.class);
    play.none(Session.OpenStream.class);
    play.end("a").receipts(RECORDED).one(Session.SendClose.class);
  }

  @Test
  void wrongCredentialsEndASessionOnlyInTheBeginning() {
    AnarchonException.Sidecar wrong = error(Status.Code.UNAUTHENTICATED, "BAD_CREDENTIALS");
    Play play = new Play().take(new Session.Start()).take(new Session.StreamEnded(1, wrong));
    assertInstanceOf(AnarchonException.Credentials.class, play.one(Session.Closed.class).error());
    play = new Play().begin().take(new Session.StreamEnded(1, wrong));
    play.none(Session.Closed.class);
    play.after(75).one(Session.OpenStream.class);
  }

  @Test
  void aReplacedSessionIsNotClosed() {
    Play play = new Play().begin();
    play.take(new Session.StreamEnded(1, error(Status.Code.ABORTED, "SESSION_REPLACED")));
    play.none(Session.SendClose.class);
    assertInstanceOf(
        AnarchonException.SessionReplaced.class, play.one(Session.Closed.class).error());
  }

  // ── Streams and answers that cross each other ─────────────────────────────────────────────────

  @Test
  void anAnswerToAKeepAliveFromBeforeAttachedExtendsNoTrust() {
    Play play = new Play().begin().endStream().after(75);
    final long promised = play.session.trustEnd();
    play.after(5_000 - 75).one(Session.SendKeepAlive.class);
    final int before = play.session.keepAlives();
    KeepAliveResponse response =
        KeepAliveResponse.newBuilder()
            .setSessionTtl(Durations.toWire(Duration.ofSeconds(15)))
            .setStreamOpen(true)
            .build();
    play.event(attached(Duration.ofSeconds(60)));
    play.take(new Session.KeepAliveAnswered(before, response));
    assertEquals(promised, play.session.trustEnd());
    play.after(1_000).answer();
    assertTrue(play.session.trustEnd() > promised);
  }

  @Test
  void anUnknownSessionOfAnOlderStreamIsNoNews() {
    Play play = new Play().begin().after(5_000);
    final int older = play.session.keepAlives();
    play.endStream().after(75).attach();
    play.take(new Session.KeepAliveFailed(older, sessionNotFound()));
    play.none(Session.EndStream.class);
    assertEquals(Session.State.ATTACHED, play.session.state());
  }

  @Test
  void anAnswerAfterTheStreamWasLostMakesNothingReady() {
    Play play = new Play().take(new Session.Start()).attach().endStream();
    play.answer().none(Session.Ready.class);
  }

  @Test
  void attachingAloneDoesNotEndTheBackOffAndAMissingSidecarIsToldOnce() {
    Play play = new Play().take(new Session.Start()).endStream();
    play.said("subscribing again until that succeeds");
    assertEquals(75, play.session.openAt() - play.now);
    play.after(75).endStream().none(Session.Say.class);
    play.after(150).attach().endStream();
    assertEquals(300, play.session.openAt() - play.now);
  }

  @Test
  void aLongerIntervalPostponesNothingAndAShorterOneIsTheDeadline() {
    Play play = new Play().begin().after(5_000).answer(interval(60_000));
    play.after(5_000).one(Session.SendKeepAlive.class);
    play.answer(interval(300));
    assertEquals(300, play.after(300).one(Session.SendKeepAlive.class).timeout());
  }

  @Test
  void aKeepAliveThatIsLessThanAnIntervalLateIsNotTold() {
    Play play = new Play().begin();
    play.now += 9_999;
    play.take(new Session.Tick()).none(Session.Say.class);
    play.one(Session.SendKeepAlive.class);
  }

  @Test
  void nothingStartsAtTheVeryEndOfTrust() {
    Play play = new Play().begin();
    play.now = play.session.trustEnd();
    play.assign("a").none(Session.StartHandler.class);
  }

  // ── Confirming ────────────────────────────────────────────────────────────────────────────────

  @Test
  void confirmIsAnsweredByAKeepAliveOfItsOwn() {
    Play play = new Play().begin().assign("a").take(new Session.ConfirmAsked("a", 1));
    assertEquals(List.of("a"), play.one(Session.SendKeepAlive.class).request().getConfirmList());
    play.take(new Session.ConfirmAsked("a", 2));
    play.none(Session.SendKeepAlive.class); // goes with the next
    play.answer(response -> response.addConfirmed("a"));
    assertEquals(new Session.AnswerConfirm(1, null), play.one(Session.AnswerConfirm.class));
    play.one(Session.SendKeepAlive.class);
    assertInstanceOf(AnarchonException.NotConfirmed.class, answerOf(play.answer(), 2));
    play.take(new Session.ConfirmAsked("a", 3));
    play.answer(response -> response.addLost(cancellation("a", FENCED)));
    assertInstanceOf(CancelledException.Fenced.class, answerOf(play, 3));
    play.take(new Session.ConfirmAsked("a", 4));
    assertInstanceOf(CancelledException.LeaseLost.class, answerOf(play, 4));
  }

  @Test
  void confirmWithoutASessionIsAnsweredAtOnce() {
    Play play = new Play().begin().assign("a").after(5_000);
    play.take(new Session.KeepAliveFailed(play.session.keepAlives(), sessionNotFound()));
    play.take(new Session.ConfirmAsked("a", 1));
    assertInstanceOf(AnarchonException.NotConfirmed.class, answerOf(play, 1));
  }

  @Test
  void aTokenIsAskedForOnceAndNoQuestionIsLeftOpen() {
    Play play = new Play().begin().assign("a").take(new Session.ConfirmAsked("a", 1));
    play.take(new Session.ConfirmAsked("a", 2)).take(new Session.ConfirmAsked("a", 3)).answer();
    assertEquals(List.of("a"), play.one(Session.SendKeepAlive.class).request().getConfirmList());
    play.take(new Session.StopAsked(0, "")).after(5_000).one(Session.SendClose.class);
    play.take(new Session.CloseEnded());
    assertEquals(
        List.of(2L, 3L),
        play.all(Session.AnswerConfirm.class).stream().map(Session.AnswerConfirm::ticket).toList());
  }

  private static AnarchonException answerOf(Play play, long ticket) {
    Session.AnswerConfirm answer = play.one(Session.AnswerConfirm.class);
    assertEquals(ticket, answer.ticket());
    return answer.error();
  }

  // ── Exit ──────────────────────────────────────────────────────────────────────────────────────

  @Test
  void theExitComesOneIntervalAfterTrustAndOnlyWhileAHandlerRuns() {
    Play play = new Play().begin();
    assertEquals(Session.NEVER, play.session.exitAt());
    play.assign("a");
    assertEquals(play.session.trustEnd() + 5_000, play.session.exitAt());
    play.after(5_000).answer(response -> response.addLost(cancellation("a", FENCED)));
    assertEquals(play.now + 5_000, play.session.exitAt());
    long lostAt = play.now;
    play.after(5_000).answer();
    assertEquals(lostAt + 5_000, play.session.exitAt(), "regained trust is not for it");
    play.cancel("a", LEASE_LOST);
    assertEquals(lostAt + 5_000, play.session.exitAt(), "lost is lost");
    play.end("a");
    assertEquals(Session.NEVER, play.session.exitAt());
  }
}

"""The session as a state machine: every rule of the client specification, without I/O."""

from __future__ import annotations

from itertools import pairwise

import pytest
from google.protobuf.duration_pb2 import Duration

from anarchon import _session as s
from anarchon._errors import (
    CredentialsError,
    LeaseLost,
    NotConfirmedError,
    RefusedError,
    SessionNotFoundError,
    SessionReplacedError,
)
from anarchon.v1 import job_pb2, run_pb2, session_pb2
from tests.unit.client.session_harness import (
    AWAY,
    INTERVAL_MS,
    SUCCESS,
    TTL_MS,
    Harness,
    stopped,
)

LEASE_LOST = run_pb2.CANCEL_REASON_LEASE_LOST
FENCED = run_pb2.CANCEL_REASON_FENCED
REQUESTED = run_pb2.CANCEL_REASON_REQUESTED
SHUTDOWN = run_pb2.CANCEL_REASON_SHUTDOWN
NOT_FOUND = SessionNotFoundError("no such session", "SESSION_NOT_FOUND")
REPLACED = SessionReplacedError("another stream", "SESSION_REPLACED")


@pytest.fixture
def harness() -> Harness:
    """A session that is attached and trusted."""
    harness = Harness()
    harness.attach_and_trust()
    return harness


# ── Attaching ───────────────────────────────────────────────────────────────────────────────────


def test_subscribes_at_once_with_its_jobs_and_nothing_in_flight() -> None:
    request = Harness().one(s.OpenStream).request
    assert [job.name for job in request.jobs] == ["sync"]
    assert request.session_id == "session"
    assert not request.in_flight


def test_a_keep_alive_follows_attached_at_once() -> None:
    harness = Harness()
    harness.attach()
    assert harness.one(s.SendKeepAlive).timeout_ms == INTERVAL_MS


def test_attached_extends_no_trust() -> None:
    harness = Harness()
    harness.attach()
    assert harness.session.trust_end_ms == 0
    assert not harness.all(s.SetTrust)


def test_s26_a_sidecar_that_came_back_with_shorter_leases_shortens_trust(harness: Harness) -> None:
    harness.assign("a")
    harness.lose_stream()
    harness.wait(100)
    harness.attach(ttl_ms=2_000)
    end_ms = harness.now_ms + 2_000
    assert harness.one(s.SetTrust).end_ms == harness.session.trust_end_ms == end_ms
    (cancel,) = [c for c in harness.wait(2_000) if isinstance(c, s.CancelHandler)]
    assert (cancel.token, cancel.reason) == ("a", LEASE_LOST)


def test_s26_what_a_sidecar_that_came_back_names_as_lost_keeps_its_reason_although_trust_ends(
    harness: Harness,
) -> None:
    harness.assign("a", "b")
    harness.lose_stream()
    harness.wait(100)
    harness.attach(session_pb2.Cancellation(token="a", reason=FENCED), ttl_ms=0)
    cancels = [(cancel.token, cancel.reason) for cancel in harness.all(s.CancelHandler)]
    assert cancels == [("a", FENCED), ("b", LEASE_LOST)]


def test_is_ready_when_the_first_keep_alive_is_answered_and_only_once() -> None:
    harness = Harness()
    harness.attach()
    assert not harness.all(s.Ready)
    harness.answer(harness.one(s.SendKeepAlive))
    assert harness.one(s.Ready).instance_id == "one"
    harness.answer(harness.next_keep_alive())
    assert not harness.all(s.Ready)


def test_keep_alives_go_out_every_interval() -> None:
    harness = Harness()
    harness.attach_and_trust()
    times = []
    for _ in range(3):
        harness.answer(harness.next_keep_alive())
        times.append(harness.now_ms)
    assert [b - a for a, b in pairwise(times)] == [INTERVAL_MS] * 2


def test_an_answer_can_shorten_the_interval(harness: Harness) -> None:
    harness.answer(harness.next_keep_alive(), interval_ms=1_000)
    harness.wait(1_000)
    assert harness.one(s.SendKeepAlive).timeout_ms == 1_000


def test_an_interval_of_nothing_does_not_make_a_busy_loop(harness: Harness) -> None:
    harness.answer(harness.next_keep_alive(), interval_ms=0)
    harness.wait(s.KEEP_ALIVE_INTERVAL_MIN_MS - 1)
    assert not harness.all(s.SendKeepAlive)
    harness.wait(1)
    assert harness.all(s.SendKeepAlive)


def test_notes_are_told() -> None:
    harness = Harness()
    attached = session_pb2.Attached(instance_id="one", notes=["the schedule is odd"])
    harness.event(session_pb2.SubscribeResponse(attached=attached))
    assert s.Log("info", "the schedule is odd") in harness.commands


# ── Trust ───────────────────────────────────────────────────────────────────────────────────────


def test_trust_counts_from_the_sending_of_the_answered_keep_alive() -> None:
    harness = Harness()
    harness.attach()
    sent, sent_at_ms = harness.one(s.SendKeepAlive), harness.now_ms
    harness.now_ms += 4_000
    harness.answer(sent)
    assert harness.one(s.SetTrust).end_ms == sent_at_ms + TTL_MS


def test_s16_handlers_are_cancelled_when_trust_ends(harness: Harness) -> None:
    harness.assign("a", "b")
    end_ms = harness.session.trust_end_ms
    harness.wait(end_ms - harness.now_ms - 1)
    assert not harness.all(s.CancelHandler)
    harness.wait(1)
    cancels = harness.all(s.CancelHandler)
    assert [(c.token, c.reason, c.trusted) for c in cancels] == [
        ("a", LEASE_LOST, False),
        ("b", LEASE_LOST, False),
    ]


def test_an_unanswered_keep_alive_extends_nothing(harness: Harness) -> None:
    end_ms = harness.session.trust_end_ms
    sent = harness.next_keep_alive()
    harness.feed(s.KeepAliveFailed(sent.number, AWAY))
    assert harness.session.trust_end_ms == end_ms


def test_a_shrinking_ttl_shrinks_trust(harness: Harness) -> None:
    harness.assign("a")
    sent = harness.next_keep_alive()
    harness.answer(sent, ttl_ms=2_000)
    assert harness.one(s.SetTrust).end_ms == harness.now_ms + 2_000
    harness.wait(2_000)
    assert harness.one(s.CancelHandler).reason == LEASE_LOST


def test_a_ttl_of_nothing_ends_trust_at_once(harness: Harness) -> None:
    harness.assign("a")
    harness.answer(harness.next_keep_alive(), ttl_ms=0)
    assert harness.one(s.CancelHandler).token == "a"


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(harness: Harness) -> None:
    harness.assign("a")
    old = harness.next_keep_alive()
    harness.feed(s.ConfirmAsked("a", 1))
    new = harness.one(s.SendKeepAlive)
    harness.answer(new, confirmed=("a",))
    end_ms = harness.session.trust_end_ms
    harness.answer(old, ttl_ms=1)
    assert harness.session.trust_end_ms == end_ms


def test_s25_a_frozen_client_first_ends_trust_and_then_hears_what_waited(harness: Harness) -> None:
    harness.assign("a")
    sent = harness.next_keep_alive()
    harness.now_ms += 60_000  # nothing ran meanwhile; then an answer from before is read
    harness.answer(sent)
    assert harness.one(s.CancelHandler).reason == LEASE_LOST


def test_s04_trust_that_lapsed_unseen_is_over_although_an_answer_brings_it_back(
    harness: Harness,
) -> None:
    harness.assign("a")
    for _ in range(2):  # these are not answered
        sent = harness.next_keep_alive()
        harness.feed(s.KeepAliveFailed(sent.number, AWAY))
    harness.wait(INTERVAL_MS - 1)
    harness.feed(s.ConfirmAsked("a", 1))
    sent = harness.one(s.SendKeepAlive)
    harness.now_ms += 10_000  # frozen for 10 s, over the end of trust
    harness.answer(sent, confirmed=("a",))
    assert harness.session.trust_end_ms > harness.now_ms
    assert harness.one(s.CancelHandler).reason == LEASE_LOST
    assert isinstance(harness.one(s.AnswerConfirm).error, LeaseLost)


def test_trust_regained_does_not_revive_what_was_lost(harness: Harness) -> None:
    harness.assign("a")
    harness.wait(INTERVAL_MS)
    harness.now_ms += TTL_MS
    harness.feed(s.Tick())
    assert harness.one(s.CancelHandler).token == "a"
    harness.answer(harness.one(s.SendKeepAlive))
    assert harness.session.trust_end_ms > harness.now_ms
    assert harness.session.exit_at_ms == harness.now_ms + INTERVAL_MS  # still counted from the loss


def test_the_exit_time_is_one_interval_after_the_end_of_trust(harness: Harness) -> None:
    end_ms = harness.session.trust_end_ms
    times: list[int | None] = [harness.session.exit_at_ms]
    harness.assign("a")
    times.append(harness.session.exit_at_ms)
    harness.end("a")
    times.append(harness.session.exit_at_ms)
    assert times == [None, end_ms + INTERVAL_MS, None]


def test_what_the_watchdog_has_told_is_lost_whatever_is_answered_later(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.TrustOver(("a", "b")))
    assert harness.one(s.CancelHandler) == s.CancelHandler("a", LEASE_LOST, "", trusted=False)
    harness.feed(s.TrustOver(("a",)))
    assert not harness.commands


# ── Assignments ─────────────────────────────────────────────────────────────────────────────────


def test_an_assignment_starts_its_handler_and_is_named_from_then_on(harness: Harness) -> None:
    harness.assign("a")
    assert harness.one(s.StartHandler).assignment.token == "a"
    assert list(harness.next_keep_alive().request.in_flight) == ["a"]


def test_an_assignment_before_the_first_answer_waits_for_it() -> None:
    harness = Harness()
    harness.attach()
    sent = harness.one(s.SendKeepAlive)
    harness.assign("a")
    assert not harness.all(s.StartHandler)
    assert harness.session.in_flight == []
    harness.answer(sent)
    assert harness.one(s.StartHandler).assignment.token == "a"


def test_an_assignment_that_waits_is_dropped_with_its_stream_and_may_come_again() -> None:
    harness = Harness()
    harness.attach()
    sent = harness.one(s.SendKeepAlive)
    harness.assign("a")
    harness.feed(s.KeepAliveFailed(sent.number, AWAY))
    harness.answer(harness.next_keep_alive())
    assert not harness.all(s.StartHandler)
    harness.assign("a")
    assert harness.all(s.StartHandler)


def test_a_duplicate_is_started_once(harness: Harness) -> None:
    harness.assign("a", "a")
    assert len(harness.all(s.StartHandler)) == 1
    harness.assign("a")
    assert not harness.all(s.StartHandler)
    harness.end("a")
    harness.assign("a")
    assert not harness.all(s.StartHandler)
    harness.receive(s.SendResults(("a",), session_pb2.CompleteRequest(), 0))
    harness.assign("a")
    assert not harness.all(s.StartHandler)


def test_tokens_are_remembered_for_max_concurrency_and_1024_more() -> None:
    harness = Harness(max_concurrency=1)
    harness.attach_and_trust()
    kept = 1 + s.REMEMBERED_BEYOND_CONCURRENCY

    def run(token: str) -> bool:
        harness.assign(token)
        if not harness.all(s.StartHandler):
            return False
        harness.end(token)
        harness.receive(harness.one(s.SendResults))
        return True

    assert all(run(f"t{number}") for number in range(kept))
    assert not run("t0")
    assert run("one more")
    assert run("t0")
    assert not run("t2")


def test_a_client_that_is_full_leaves_an_assignment_unaccepted() -> None:
    harness = Harness(max_concurrency=1)
    harness.attach_and_trust()
    harness.assign("a", "b")
    assert harness.one(s.StartHandler).assignment.token == "a"
    assert harness.session.in_flight == ["a"]
    harness.end("a")
    harness.assign("b")  # sent again
    assert harness.one(s.StartHandler).assignment.token == "b"


def test_a_run_of_an_unknown_job_is_not_accepted(harness: Harness) -> None:
    harness.assign("a", job="other")
    assert harness.one(s.Log).level == "error"
    assert harness.session.in_flight == []


# ── Cancellation ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reason", "trusted"),
    [(REQUESTED, True), (run_pb2.CANCEL_REASON_TIMEOUT, True), (FENCED, False)],
)
def test_a_cancellation_reaches_the_handler(
    harness: Harness, reason: run_pb2.CancelReason, trusted: bool
) -> None:
    harness.assign("a")
    harness.cancel("a", reason)
    assert harness.one(s.CancelHandler) == s.CancelHandler("a", reason, "", trusted)
    assert harness.session.in_flight == ["a"], "it runs until it obeys"


def test_a_second_cancellation_is_no_news_unless_it_ends_trust(harness: Harness) -> None:
    harness.assign("a")
    harness.cancel("a", REQUESTED)
    harness.cancel("a", SHUTDOWN)
    assert not harness.commands
    harness.cancel("a", FENCED)
    assert harness.one(s.CancelHandler).reason == FENCED
    harness.cancel("a", LEASE_LOST)
    assert not harness.commands


def test_a_cancellation_of_what_has_ended_means_nothing(harness: Harness) -> None:
    harness.assign("a")
    harness.end("a")
    harness.cancel("a", REQUESTED)
    assert not harness.commands


def test_what_is_cancelled_before_it_started_is_reported_as_stopped() -> None:
    harness = Harness()
    harness.attach()
    harness.assign("a")
    harness.cancel("a", REQUESTED)
    (result,) = harness.one(s.SendResults).request.results
    assert result.outcome.stopped == stopped(REQUESTED).stopped
    assert result.outcome.HasField("elapsed")
    assert result.outcome.elapsed.ToMilliseconds() == 0
    assert not harness.all(s.StartHandler)


def test_s17_what_an_answer_names_as_lost_is_cancelled_as_no_longer_ours(harness: Harness) -> None:
    harness.assign("a", "b")
    harness.answer(harness.next_keep_alive(), lost={"a": FENCED})
    assert harness.one(s.CancelHandler) == s.CancelHandler("a", FENCED, "", trusted=False)


def test_lost_without_a_reason_is_a_lost_lease(harness: Harness) -> None:
    harness.assign("a")
    unspecified = run_pb2.CANCEL_REASON_UNSPECIFIED
    harness.answer(harness.next_keep_alive(), lost={"a": unspecified})
    assert harness.one(s.CancelHandler).reason == LEASE_LOST


# ── Results ─────────────────────────────────────────────────────────────────────────────────────


def test_a_result_is_sent_at_once_and_named_until_its_receipt(harness: Harness) -> None:
    harness.assign("a")
    harness.end("a")
    sent = harness.one(s.SendResults)
    assert sent.timeout_ms == 10_000
    assert sent.request.results[0] == session_pb2.Result(token="a", outcome=SUCCESS)
    assert harness.session.in_flight == ["a"]
    harness.receive(sent)
    assert harness.session.in_flight == []


def test_s14_results_that_end_while_a_call_is_under_way_go_together(harness: Harness) -> None:
    harness.assign("a", "b", "c")
    harness.end("a")
    first = harness.one(s.SendResults)
    harness.end("b")
    harness.end("c")
    assert not harness.all(s.SendResults)
    harness.receive(first)
    assert harness.one(s.SendResults).tokens == ("b", "c")


@pytest.mark.parametrize("lost_reply", [True, False])
def test_a_result_without_a_receipt_is_repeated_with_backoff(
    harness: Harness, lost_reply: bool
) -> None:
    harness.assign("a")
    harness.end("a")
    pauses_ms = []
    for _ in range(8):
        sent, before_ms = harness.one(s.SendResults), harness.now_ms
        if lost_reply:
            harness.feed(s.ResultsFailed(sent.tokens, AWAY))
        else:
            harness.receive(sent, session_pb2.RECEIPT_STATUS_STORE_UNAVAILABLE)
        while not harness.all(s.SendResults):
            harness.wait(50)
        pauses_ms.append(harness.now_ms - before_ms)
    assert pauses_ms == [50, 100, 200, 400, 800, 1_600, 2_500, 2_500]


def test_a_result_is_given_up_after_five_minutes(harness: Harness) -> None:
    harness.assign("a")
    harness.end("a")
    sent = harness.one(s.SendResults)
    harness.feed(s.ResultsFailed(sent.tokens, AWAY))
    harness.now_ms += s.COMPLETE_FOR_MS - 1
    harness.feed(s.Tick())
    assert harness.all(s.SendResults)
    harness.wait(1)
    assert harness.session.in_flight == []
    assert "sync 1 attempt 1" in harness.one(s.Log).message
    harness.receive(sent)  # an answer after that means nothing
    assert not harness.commands


@pytest.mark.parametrize(
    ("lease_min", "given_up_after_min"),
    [(None, 5), (1, 5), (5, 5), (6, 6), (60, 60), (61, 60), (-1, 5)],
)
def test_a_result_is_repeated_while_its_lease_can_last_for_5_to_60_minutes(
    harness: Harness, lease_min: int | None, given_up_after_min: int
) -> None:
    harness.assign("a", lease_ms=None if lease_min is None else lease_min * 60_000)
    harness.end("a")
    harness.feed(s.ResultsFailed(harness.one(s.SendResults).tokens, AWAY))
    harness.now_ms += given_up_after_min * 60_000 - 1
    harness.feed(s.Tick())
    assert harness.all(s.SendResults)
    harness.wait(1)
    assert harness.session.in_flight == []
    assert f"for {given_up_after_min} min, and is given up" in harness.one(s.Log).message


@pytest.mark.parametrize("order", [("hour", "short"), ("short", "hour")])
def test_results_are_given_up_each_in_its_time_whatever_ended_first(
    harness: Harness, order: tuple[str, str]
) -> None:
    harness.assign("hour", lease_ms=3_600_000)
    harness.assign("received", "short", lease_ms=30_000)
    harness.end("received")
    sent = harness.one(s.SendResults)
    give_up_at_ms = {}
    for token in order:
        harness.now_ms += 1_000
        harness.end(token)
        for_ms = 3_600_000 if token == "hour" else s.COMPLETE_FOR_MS
        give_up_at_ms[token] = harness.now_ms + for_ms
    harness.receive(sent)  # and what is sent from here on is not answered any more
    harness.wait(give_up_at_ms["short"] - 1 - harness.now_ms)
    assert set(harness.session.in_flight) == {"hour", "short"}
    harness.wait(1)
    assert harness.session.in_flight == ["hour"]
    harness.wait(give_up_at_ms["hour"] - 1 - harness.now_ms)
    assert harness.session.in_flight == ["hour"]
    harness.wait(1)
    assert harness.session.in_flight == []


@pytest.mark.parametrize(
    ("status", "why"),
    [
        # Nobody else need have begun: it is also the answer where the store was out of reach.
        (session_pb2.RECEIPT_STATUS_FENCED, "its attempt no longer held the lease"),
        (session_pb2.RECEIPT_STATUS_UNKNOWN_TOKEN, "the sidecar knows no such attempt"),
        (session_pb2.RECEIPT_STATUS_ALREADY_COMPLETED, "another outcome is in the store"),
    ],
)
def test_a_result_that_does_not_count_is_told_and_not_repeated(
    harness: Harness, status: session_pb2.ReceiptStatus, why: str
) -> None:
    harness.assign("a")
    harness.end("a")
    harness.receive(harness.one(s.SendResults), status)
    said = harness.one(s.Log)
    assert said.level == "warning"
    assert said.message.endswith(f" did not count: {why}")
    assert harness.session.in_flight == []


def test_a_result_that_is_refused_spoils_no_other(harness: Harness) -> None:
    harness.assign("a", "b", "c")
    harness.end("a")
    first = harness.one(s.SendResults)
    harness.end("b")
    harness.end("c")
    harness.receive(first)
    harness.feed(s.ResultsFailed(("b", "c"), RefusedError("b is bad")))
    assert harness.one(s.SendResults).tokens == ("b",)
    harness.feed(s.ResultsFailed(("b",), RefusedError("b is bad")))
    assert "b is bad" in harness.one(s.Log).message
    assert harness.one(s.SendResults).tokens == ("c",)


def test_a_batch_of_results_ends_at_1000_and_at_2_mib() -> None:
    harness = Harness(max_concurrency=3_000)
    harness.attach_and_trust()
    tokens = [f"t{number}" for number in range(2_000)]
    harness.assign("first", *tokens)
    harness.end("first")
    first = harness.one(s.SendResults)
    for token in tokens:
        harness.end(token)
    harness.receive(first)
    small = harness.one(s.SendResults)
    assert len(small.tokens) == 1_000
    big = run_pb2.Outcome(success=run_pb2.Success(result="x" * 16_384))
    harness.assign(*(f"big{number}" for number in range(200)))
    for number in range(200):
        harness.end(f"big{number}", big)
    harness.receive(small)
    harness.receive(harness.one(s.SendResults))
    request = harness.one(s.SendResults).request
    assert 100 < len(request.results) < 130
    assert request.ByteSize() <= 2 * 1024 * 1024


def test_a_result_goes_out_although_there_is_no_stream(harness: Harness) -> None:
    harness.assign("a")
    harness.lose_stream()
    harness.end("a")
    assert harness.one(s.SendResults).tokens == ("a",)


# ── Losing the stream, the session, the sidecar ─────────────────────────────────────────────────


def test_s24_a_lost_stream_is_opened_again_with_what_is_in_flight(harness: Harness) -> None:
    harness.assign("a", "b")
    harness.end("b")
    harness.lose_stream()
    assert not harness.all(s.CancelHandler)
    harness.wait(100)
    request = harness.one(s.OpenStream).request
    assert list(request.in_flight) == ["a", "b"]
    harness.attach()
    assert harness.one(s.SendKeepAlive).request.in_flight == ["a", "b"]


def test_s24_keep_alives_go_on_without_a_stream_and_extend_no_trust(harness: Harness) -> None:
    harness.assign("a")
    harness.lose_stream()
    end_ms = harness.session.trust_end_ms
    harness.wait(INTERVAL_MS)
    harness.answer(harness.one(s.SendKeepAlive), stream_open=False)
    assert harness.session.trust_end_ms == end_ms
    harness.attach_and_trust()
    assert harness.session.trust_end_ms > end_ms


def test_s26_a_restarted_sidecar_that_we_are_not_attached_to_extends_no_trust(
    harness: Harness,
) -> None:
    harness.assign("a")
    end_ms = harness.session.trust_end_ms
    harness.lose_stream()
    cancelled_at_ms = None
    while cancelled_at_ms is None:  # its store is away: no stream, but keep-alives are answered
        harness.wait(10)
        for command in harness.commands:
            if isinstance(command, s.SendKeepAlive):
                harness.answer(command, stream_open=False)
            elif isinstance(command, s.OpenStream):
                harness.lose_stream()
            elif isinstance(command, s.CancelHandler):
                cancelled_at_ms = harness.now_ms
    assert cancelled_at_ms == end_ms


@pytest.mark.parametrize("attached_again", [False, True])
def test_s26_an_answer_that_comes_after_its_stream_was_lost_extends_no_trust(
    harness: Harness, attached_again: bool
) -> None:
    end_ms = harness.session.trust_end_ms
    sent = harness.next_keep_alive()
    harness.lose_stream()
    harness.wait(100)
    if attached_again:
        harness.attach()
    harness.answer(sent)
    assert harness.session.trust_end_ms == end_ms


def test_s26_an_answer_to_a_keep_alive_from_before_attached_extends_no_trust(
    harness: Harness,
) -> None:
    harness.lose_stream()
    harness.wait(100)
    end_ms = harness.session.trust_end_ms
    sent = harness.next_keep_alive()
    harness.attach()
    harness.answer(sent)
    assert harness.session.trust_end_ms == end_ms


def test_a_sidecar_that_has_lost_our_stream_extends_no_trust(harness: Harness) -> None:
    end_ms = harness.session.trust_end_ms
    harness.answer(harness.next_keep_alive(), stream_open=False)
    assert harness.session.trust_end_ms == end_ms


def test_a_ttl_that_shrinks_shortens_trust_although_there_is_no_stream(harness: Harness) -> None:
    harness.assign("a")
    harness.lose_stream()
    sent = harness.next_keep_alive()
    harness.answer(sent, ttl_ms=1_000, stream_open=False)
    assert harness.session.trust_end_ms == harness.now_ms + 1_000


def test_s26_what_the_sidecar_that_came_back_does_not_own_is_lost(harness: Harness) -> None:
    harness.assign("a", "b")
    harness.lose_stream()
    harness.wait(100)
    harness.attach(session_pb2.Cancellation(token="a", reason=FENCED))
    assert harness.one(s.CancelHandler) == s.CancelHandler("a", FENCED, "", trusted=False)


def test_s26_a_sidecar_gone_for_good_ends_trust_from_the_last_answer(harness: Harness) -> None:
    harness.assign("a")
    sent_at_ms = harness.now_ms
    harness.lose_stream()
    cancelled_at_ms = None
    while cancelled_at_ms is None:
        harness.wait(10)
        for command in harness.commands:
            if isinstance(command, s.SendKeepAlive):
                harness.feed(s.KeepAliveFailed(command.number, AWAY))
            elif isinstance(command, s.OpenStream):
                harness.lose_stream()
            elif isinstance(command, s.CancelHandler):
                cancelled_at_ms = harness.now_ms
    assert cancelled_at_ms == sent_at_ms + TTL_MS


@pytest.mark.parametrize("spread", [0.0, 0.999])
def test_reconnecting_backs_off_from_100_ms_to_5_s(spread: float) -> None:
    harness = Harness(spread=spread)
    pauses_ms = []
    for _ in range(9):
        harness.lose_stream()
        before_ms = harness.now_ms
        while not harness.all(s.OpenStream):
            harness.wait(1)
        pauses_ms.append(harness.now_ms - before_ms)
    share = 0.5 + spread / 2
    longest_ms = [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000, 5_000]
    assert pauses_ms == pytest.approx([ms * share for ms in longest_ms], abs=1.5)


def test_the_backoff_begins_anew_once_a_keep_alive_was_answered() -> None:
    harness = Harness()
    for _ in range(6):
        harness.lose_stream()
        harness.wait(5_000)
    harness.attach()
    harness.answer(harness.one(s.SendKeepAlive))
    harness.lose_stream()
    harness.wait(50)
    assert harness.all(s.OpenStream)


def test_a_sidecar_that_accepts_and_breaks_off_is_not_called_ever_faster() -> None:
    harness = Harness()
    opened = 0
    for _ in range(200):
        harness.attach()
        harness.lose_stream()
        harness.wait(2_500)
        opened += len(harness.all(s.OpenStream))
    assert opened <= 210


def test_a_missing_sidecar_is_told_once_and_its_return_once() -> None:
    harness = Harness()
    told = []
    for _ in range(5):
        harness.lose_stream()
        told += harness.all(s.Log)
        harness.wait(5_000)
    assert [log.level for log in told] == ["warning"]
    harness.attach()
    assert "attached again" in harness.one(s.Log).message


def test_session_not_found_subscribes_again_and_trust_goes_on(harness: Harness) -> None:
    harness.assign("a")
    end_ms = harness.session.trust_end_ms
    sent = harness.next_keep_alive()
    harness.feed(s.KeepAliveFailed(sent.number, NOT_FOUND))
    assert harness.all(s.EndStream)
    harness.wait(100)
    assert list(harness.one(s.OpenStream).request.in_flight) == ["a"]
    assert harness.session.trust_end_ms == end_ms
    harness.wait(1_000)
    assert not harness.all(s.SendKeepAlive), "no keep-alive before the session is there again"


def test_an_answer_without_a_stream_subscribes_again(harness: Harness) -> None:
    harness.answer(harness.next_keep_alive(), stream_open=False)
    assert harness.all(s.EndStream)
    harness.wait(100)
    assert harness.all(s.OpenStream)


def test_an_answer_about_an_older_stream_opens_no_other(harness: Harness) -> None:
    sent = harness.next_keep_alive()
    harness.lose_stream()
    harness.wait(100)
    harness.attach()
    harness.answer(sent, stream_open=False)
    assert not harness.all(s.EndStream)
    harness.wait(1_000)
    assert not harness.all(s.OpenStream)


def test_events_of_an_older_stream_are_not_heard(harness: Harness) -> None:
    old = harness.stream
    harness.lose_stream()
    harness.wait(100)
    runs = session_pb2.Assignments(assignments=[session_pb2.Assignment(token="a", job="sync")])
    harness.feed(s.StreamEvent(old, session_pb2.SubscribeResponse(runs=runs)))
    harness.feed(s.StreamEnded(old, AWAY))
    harness.attach_and_trust()
    assert not harness.all(s.StartHandler)


def test_a_drain_is_told_and_running_handlers_go_on(harness: Harness) -> None:
    harness.assign("a")
    harness.event(
        session_pb2.SubscribeResponse(drain=session_pb2.Drain(grace=Duration(seconds=20)))
    )
    assert harness.one(s.Log).level == "info"
    harness.answer(harness.next_keep_alive())
    assert not harness.all(s.CancelHandler)
    harness.lose_stream()
    harness.wait(100)
    assert harness.all(s.OpenStream)


def test_an_event_of_a_later_version_is_ignored(harness: Harness) -> None:
    harness.event(session_pb2.SubscribeResponse())
    assert not harness.commands


# ── Errors that end the session ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [RefusedError("bad job"), CredentialsError("no token")])
def test_a_refused_subscribe_ends_the_session_with_the_servers_words(error: RefusedError) -> None:
    harness = Harness()
    harness.lose_stream(error)
    assert harness.one(s.Closed).error is error
    assert not harness.all(s.SendClose), "there is no session to close"
    assert harness.session.wake_at_ms is None


def test_a_call_token_that_goes_stale_later_is_no_reason_to_give_up(harness: Harness) -> None:
    harness.lose_stream(CredentialsError("no token"))
    assert not harness.all(s.Closed)
    harness.wait(100)
    assert harness.all(s.OpenStream)


def test_a_replaced_session_stops_its_handlers_and_leaves_the_session_alone(
    harness: Harness,
) -> None:
    harness.assign("a")
    harness.lose_stream(REPLACED)
    assert harness.one(s.CancelHandler).reason == SHUTDOWN
    harness.end("a", stopped(SHUTDOWN))
    harness.receive(harness.one(s.SendResults))
    assert harness.one(s.Closed).error is REPLACED
    assert not harness.all(s.SendClose)


def test_a_refused_keep_alive_stops_handlers_reports_and_closes(harness: Harness) -> None:
    harness.assign("a")
    error = RefusedError("too far apart", "VERSION")
    harness.feed(s.KeepAliveFailed(harness.next_keep_alive().number, error))
    assert harness.one(s.CancelHandler).reason == SHUTDOWN
    harness.lose_stream()
    assert not harness.all(s.OpenStream)
    harness.end("a", stopped(SHUTDOWN))
    harness.receive(harness.one(s.SendResults))
    harness.one(s.SendClose)
    harness.feed(s.CloseEnded())
    assert harness.one(s.Closed).error is error


def test_a_subscribe_over_4_mib_is_refused_before_it_is_sent() -> None:
    label = {"why": "x" * 100}
    jobs = [job_pb2.JobSpec(name="n" * 120 + str(i), labels=label) for i in range(20_000)]
    harness = Harness(*jobs)
    assert not harness.all(s.OpenStream)
    assert "4,194,304" in str(harness.one(s.Closed).error)


# ── confirm() ───────────────────────────────────────────────────────────────────────────────────


def test_confirm_sends_a_keep_alive_at_once_that_names_the_token(harness: Harness) -> None:
    harness.assign("a", "b")
    harness.feed(s.ConfirmAsked("a", 7))
    sent = harness.one(s.SendKeepAlive)
    assert list(sent.request.confirm) == ["a"]
    assert list(sent.request.in_flight) == ["a", "b"]
    harness.answer(sent, confirmed=("a",))
    assert harness.one(s.AnswerConfirm) == s.AnswerConfirm(7, None)


def test_what_is_neither_confirmed_nor_lost_could_not_be_confirmed(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.ConfirmAsked("a", 7))
    harness.answer(harness.one(s.SendKeepAlive))
    assert isinstance(harness.one(s.AnswerConfirm).error, NotConfirmedError)


def test_what_is_lost_is_cancelled_and_not_confirmed(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.ConfirmAsked("a", 7))
    harness.answer(harness.one(s.SendKeepAlive), lost={"a": FENCED})
    assert isinstance(harness.one(s.AnswerConfirm).error, LeaseLost)
    assert harness.one(s.CancelHandler).reason == FENCED


def test_a_keep_alive_that_fails_confirms_nothing(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.ConfirmAsked("a", 7))
    harness.feed(s.KeepAliveFailed(harness.one(s.SendKeepAlive).number, AWAY))
    assert isinstance(harness.one(s.AnswerConfirm).error, NotConfirmedError)


def test_questions_asked_while_one_is_under_way_go_together_after_it(harness: Harness) -> None:
    harness.assign("a", "b")
    harness.feed(s.ConfirmAsked("a", 1))
    first = harness.one(s.SendKeepAlive)
    harness.feed(s.ConfirmAsked("a", 2))
    harness.feed(s.ConfirmAsked("b", 3))
    assert not harness.all(s.SendKeepAlive)
    harness.answer(first, confirmed=("a",))
    second = harness.one(s.SendKeepAlive)
    assert list(second.request.confirm) == ["a", "b"]
    harness.answer(second, confirmed=("a", "b"))
    assert [answer.ticket for answer in harness.all(s.AnswerConfirm)] == [2, 3]


def test_confirm_without_a_sidecar_is_answered_at_once(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.KeepAliveFailed(harness.next_keep_alive().number, NOT_FOUND))
    harness.feed(s.ConfirmAsked("a", 7))
    assert isinstance(harness.one(s.AnswerConfirm).error, NotConfirmedError)


def test_confirm_of_what_is_lost_is_answered_at_once(harness: Harness) -> None:
    harness.assign("a")
    harness.cancel("a", FENCED)
    harness.feed(s.ConfirmAsked("a", 7))
    assert isinstance(harness.one(s.AnswerConfirm).error, LeaseLost)
    assert not harness.all(s.SendKeepAlive)


def test_no_question_is_left_open_at_the_end(harness: Harness) -> None:
    harness.assign("a", "b")
    harness.feed(s.ConfirmAsked("a", 1))
    harness.feed(s.ConfirmAsked("b", 2))
    harness.feed(s.StopAsked(0))
    harness.end("a")
    harness.end("b")
    harness.receive(s.SendResults(("a", "b"), session_pb2.CompleteRequest(), 0))
    harness.feed(s.CloseEnded())
    assert 1 in [answer.ticket for answer in harness.all(s.AnswerConfirm)]


# ── Leaving ─────────────────────────────────────────────────────────────────────────────────────


def test_s23_leaving_says_so_at_once_and_lets_handlers_finish(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.StopAsked(20_000))
    sent = harness.one(s.SendKeepAlive)
    assert sent.request.draining
    harness.answer(sent)
    harness.answer(harness.next_keep_alive())
    harness.end("a")
    harness.receive(harness.one(s.SendResults))
    assert list(harness.one(s.SendClose).request.stopped) == []
    harness.feed(s.CloseEnded())
    assert harness.one(s.Closed).error is None


def test_leaving_with_nothing_running_closes_at_once(harness: Harness) -> None:
    harness.feed(s.StopAsked(20_000))
    harness.one(s.SendClose)


def test_leaving_before_a_sidecar_was_found_is_over_at_once() -> None:
    harness = Harness()
    harness.feed(s.StopAsked(20_000))
    assert harness.one(s.Closed).error is None


def test_s23_after_the_grace_handlers_are_cancelled_and_handed_over(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.StopAsked(8_000))
    harness.answer(harness.one(s.SendKeepAlive))
    harness.wait(7_999)
    assert not harness.all(s.CancelHandler)
    harness.answer(harness.one(s.SendKeepAlive))
    harness.wait(1)
    assert harness.one(s.CancelHandler) == s.CancelHandler("a", SHUTDOWN, "", trusted=True)
    harness.end("a", stopped(SHUTDOWN))
    assert harness.one(s.SendResults).request.results[0].outcome == stopped(SHUTDOWN)


def test_s23_a_second_request_skips_the_grace_and_none_lengthens_it(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.StopAsked(20_000))
    harness.feed(s.StopAsked(60_000))
    harness.feed(s.StopAsked(0))
    assert harness.one(s.CancelHandler).reason == SHUTDOWN


def test_a_job_may_have_a_shorter_grace_of_its_own_and_no_longer_one() -> None:
    def spec(name: str, grace_s: int) -> job_pb2.JobSpec:
        return job_pb2.JobSpec(name=name, stop_grace=Duration(seconds=grace_s))

    harness = Harness(spec("short", 2), spec("long", 60))
    harness.attach_and_trust()
    harness.assign("a", job="short")
    harness.assign("b", job="long")
    harness.feed(s.StopAsked(4_000))
    harness.answer(harness.one(s.SendKeepAlive))
    harness.wait(2_000)
    assert harness.one(s.CancelHandler).token == "a"
    harness.wait(2_000)
    assert harness.one(s.CancelHandler).token == "b"


def test_a_handler_that_does_not_stop_is_left_to_its_lease(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.StopAsked(0))
    harness.answer(harness.one(s.SendKeepAlive))
    harness.wait(s.CANCEL_GRACE_MS - 1)
    assert not harness.all(s.SendClose)
    harness.wait(1)
    assert list(harness.one(s.SendClose).request.stopped) == []
    assert "sync 1 attempt 1" in harness.one(s.Log).message


def test_what_surely_stopped_without_a_receipt_is_named_on_closing(harness: Harness) -> None:
    harness.assign("a", "b")
    harness.feed(s.StopAsked(0))
    harness.answer(harness.one(s.SendKeepAlive))
    harness.end("a", stopped(SHUTDOWN))
    harness.feed(s.ResultsFailed(harness.one(s.SendResults).tokens, AWAY))
    harness.end("b")
    harness.now_ms += s.CANCEL_GRACE_MS
    harness.feed(s.Tick())
    assert list(harness.one(s.SendClose).request.stopped) == ["a"]
    assert "could not be reported" in harness.one(s.Log).message


def test_what_comes_while_leaving_is_not_started_and_handed_over(harness: Harness) -> None:
    harness.assign("a")
    harness.feed(s.StopAsked(20_000))
    harness.assign("b")
    assert not harness.all(s.StartHandler)
    harness.end("a")
    harness.receive(harness.one(s.SendResults))
    assert list(harness.one(s.SendClose).request.stopped) == ["b"]


def test_a_client_that_leaves_keeps_its_session_until_its_handlers_have_ended(
    harness: Harness,
) -> None:
    harness.assign("a")
    harness.feed(s.StopAsked(20_000))
    harness.lose_stream()
    harness.wait(100)
    assert list(harness.one(s.OpenStream).request.in_flight) == ["a"]
    harness.attach()
    assert harness.one(s.SendKeepAlive).request.draining


def test_after_the_end_nothing_is_done_any_more(harness: Harness) -> None:
    harness.feed(s.StopAsked(0))
    harness.feed(s.CloseEnded())
    harness.feed(s.Start())
    harness.assign("a")
    assert not harness.commands
    assert harness.session.wake_at_ms is None

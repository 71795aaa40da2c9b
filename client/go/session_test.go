package anarchon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

// The session in virtual time: every rule of the specification, alone.

const (
	recorded    = anarchonv1.ReceiptStatus_RECEIPT_STATUS_RECORDED
	notNow      = anarchonv1.ReceiptStatus_RECEIPT_STATUS_STORE_UNAVAILABLE
	wasFenced   = anarchonv1.ReceiptStatus_RECEIPT_STATUS_FENCED
	leaseLost   = anarchonv1.CancelReason_CANCEL_REASON_LEASE_LOST
	isFenced    = anarchonv1.CancelReason_CANCEL_REASON_FENCED
	isTimeout   = anarchonv1.CancelReason_CANCEL_REASON_TIMEOUT
	isShutdown  = anarchonv1.CancelReason_CANCEL_REASON_SHUTDOWN
	isRequested = anarchonv1.CancelReason_CANCEL_REASON_REQUESTED
)

// play drives one session.
type play struct {
	*testing.T
	s   *session
	now millis
	out []any // of the last fact
}

func newPlay(t *testing.T, jobs ...Job) *play {
	t.Helper()
	if len(jobs) == 0 {
		jobs = []Job{Every("job", time.Second, nothing)}
	}
	if _, err := collect(jobs); err != nil {
		t.Fatal(err)
	}
	request := &anarchonv1.SubscribeRequest{SessionId: "session", Jobs: specsOf(jobs), MaxConcurrency: 2}
	return &play{T: t, s: newSession(request, func() float64 { return 0.5 }), now: 1_000_000}
}

func (p *play) take(fact any) *play {
	p.Helper()
	p.out = p.s.handle(p.now, fact)
	return p
}

// after lets time pass, with every tick that the session asks for on the way.
func (p *play) after(wait millis) *play {
	p.Helper()
	end := p.now + wait
	var all []any
	for p.s.wakeAt() <= end {
		p.now = max(p.now, p.s.wakeAt())
		all = append(all, p.take(tick{}).out...)
	}
	p.now = end
	p.out = append(all, p.take(tick{}).out...)
	return p
}

func (p *play) event(event *anarchonv1.SubscribeResponse) *play {
	p.Helper()
	return p.take(streamEvent{p.s.stream, event})
}

func (p *play) attach() *play {
	p.Helper()
	return p.event(&anarchonv1.SubscribeResponse{Event: &anarchonv1.SubscribeResponse_Attached{
		Attached: &anarchonv1.Attached{
			InstanceId: "one", KeepAliveInterval: durationpb.New(5 * time.Second), SessionTtl: durationpb.New(15 * time.Second),
		},
	}})
}

// answer answers the newest keep-alive.
func (p *play) answer(change ...func(*anarchonv1.KeepAliveResponse)) *play {
	p.Helper()
	response := &anarchonv1.KeepAliveResponse{SessionTtl: durationpb.New(15 * time.Second), StreamOpen: true}
	for _, each := range change {
		each(response)
	}
	return p.take(keepAliveAnswered{p.s.keepAlives, response})
}

// begin is a session that is attached and trusted.
func (p *play) begin() *play {
	p.Helper()
	p.take(start{}).attach().answer()
	return p
}

func (p *play) assign(token string) *play {
	p.Helper()
	return p.assignAs(&anarchonv1.Assignment{Token: token, Job: "job", Slot: 5, Attempt: 1})
}

func (p *play) assignAs(assignment *anarchonv1.Assignment) *play {
	p.Helper()
	return p.event(&anarchonv1.SubscribeResponse{Event: &anarchonv1.SubscribeResponse_Runs{
		Runs: &anarchonv1.Assignments{Assignments: []*anarchonv1.Assignment{assignment}},
	}})
}

func (p *play) cancelEvent(token string, reason anarchonv1.CancelReason) *play {
	p.Helper()
	return p.event(&anarchonv1.SubscribeResponse{Event: &anarchonv1.SubscribeResponse_Cancel{
		Cancel: &anarchonv1.Cancellation{Token: token, Reason: reason},
	}})
}

func (p *play) end(token string) *play {
	p.Helper()
	return p.take(handlerEnded{token, &anarchonv1.Outcome{
		Result: &anarchonv1.Outcome_Success{Success: &anarchonv1.Success{}},
	}})
}

func (p *play) receipts(statuses ...anarchonv1.ReceiptStatus) *play {
	p.Helper()
	sent := one[sendResults](p)
	response := &anarchonv1.CompleteResponse{}
	for _, status := range statuses {
		response.Receipts = append(response.Receipts, &anarchonv1.Receipt{Status: status})
	}
	return p.take(resultsAnswered{sent.tokens, response})
}

// all returns the commands of a kind out of the last ones.
func all[Command any](p *play) []Command {
	var found []Command
	for _, command := range p.out {
		if fits, is := command.(Command); is {
			found = append(found, fits)
		}
	}
	return found
}

// one returns the only command of a kind, and fails the test where it is not the only one.
func one[Command any](p *play) Command {
	p.Helper()
	found := all[Command](p)
	if len(found) != 1 {
		p.Fatalf("%d commands %T in %#v; want 1", len(found), *new(Command), p.out)
	}
	return found[0]
}

func none[Command any](p *play) {
	p.Helper()
	if found := all[Command](p); len(found) != 0 {
		p.Fatalf("commands %#v; want none", found)
	}
}

func (p *play) said(words string) {
	p.Helper()
	for _, each := range all[say](p) {
		if strings.Contains(each.message, words) {
			return
		}
	}
	p.Errorf("%q was not said: %v", words, all[say](p))
}

func unavailableNow() *SidecarError { return sidecarError(codes.Unavailable, "", "gone") }

func ttl(length time.Duration) func(*anarchonv1.KeepAliveResponse) {
	return func(r *anarchonv1.KeepAliveResponse) { r.SessionTtl = durationpb.New(length) }
}

func closedStream(r *anarchonv1.KeepAliveResponse) { r.StreamOpen = false }

func lost(token string, reason anarchonv1.CancelReason) func(*anarchonv1.KeepAliveResponse) {
	return func(r *anarchonv1.KeepAliveResponse) {
		r.Lost = append(r.Lost, &anarchonv1.Cancellation{Token: token, Reason: reason})
	}
}

func TestAttachingSendsAKeepAliveAtOnceAndIsReadyWithItsAnswer(t *testing.T) {
	p := newPlay(t).take(start{})
	if opened := one[openStream](p); opened.request.SessionId != "session" || len(opened.request.Jobs) != 1 {
		t.Error(opened)
	}
	none[sendKeepAlive](p)
	p.attach()
	if sent := one[sendKeepAlive](p); sent.request.SessionId != "session" || sent.timeout != 5_000 {
		t.Error(sent)
	}
	none[ready](p)
	if p.s.trustEnd > 0 {
		t.Error("attaching extends no trust")
	}
	p.answer()
	if got := one[ready](p); got.instanceID != "one" {
		t.Error(got)
	}
	p.after(5_000)
	one[sendKeepAlive](p)
}

func TestNothingIsStartedBeforeThereIsTrust(t *testing.T) {
	p := newPlay(t).take(start{}).attach().assign("a")
	none[startHandler](p)
	if got := one[startHandler](p.answer()); got.assignment.Token != "a" {
		t.Error(got)
	}
}

func TestTrustCountsFromTheSending(t *testing.T) {
	p := newPlay(t).begin().after(5_000)
	sentAt := p.now
	p.after(4_000).answer()
	if p.s.trustEnd != sentAt+15_000 {
		t.Errorf("trust ends %d ms after the sending", p.s.trustEnd-sentAt)
	}
}

func TestAtTheEndOfTrustEveryAttemptIsLostWhateverWasAnsweredMeanwhile(t *testing.T) {
	p := newPlay(t).begin().assign("a").after(5_000)
	p.now += 10_000 // the process stood still; the answer waited in a buffer
	cancel := one[cancelHandler](p.answer())
	if cancel.token != "a" || cancel.reason != leaseLost || cancel.trusted {
		t.Error(cancel)
	}
	p.said("no keep-alive was sent for at least")
	p.after(1_000).assign("b")
	one[startHandler](p) // regained trust holds for new attempts
	none[cancelHandler](p.after(1_000))
}

func TestTrustMayShrinkToNothing(t *testing.T) {
	p := newPlay(t).begin().assign("a").after(5_000)
	if cancel := one[cancelHandler](p.answer(ttl(0))); cancel.reason != leaseLost || cancel.trusted {
		t.Error(cancel)
	}
}

func TestOnlyASidecarThatWeAreAttachedToExtendsTrust(t *testing.T) {
	p := newPlay(t).begin().assign("a")
	end := p.s.trustEnd
	p.take(streamEnded{p.s.stream, unavailableNow()}).after(5_000).answer()
	if p.s.trustEnd != end {
		t.Error("extended without a stream")
	}
	p.attach().answer(closedStream)
	if p.s.trustEnd > end {
		t.Error("extended by one that does not know the stream")
	}
}

func TestAttachingAgainShortensTrust(t *testing.T) {
	p := newPlay(t).begin().assign("a").take(streamEnded{noStream, unavailableNow()})
	p.take(streamEnded{p.s.stream, unavailableNow()}).after(100)
	p.event(&anarchonv1.SubscribeResponse{Event: &anarchonv1.SubscribeResponse_Attached{
		Attached: &anarchonv1.Attached{SessionTtl: durationpb.New(2 * time.Second)},
	}})
	if p.s.trustEnd != p.now+2_000 {
		t.Error(p.s.trustEnd - p.now)
	}
}

// noStream is no stream of ours.
const noStream = -1

func TestALostStreamIsOpenedAgainWithWhatIsInFlight(t *testing.T) {
	p := newPlay(t).begin().assign("a").assign("b").end("b")
	p.take(streamEnded{p.s.stream, unavailableNow()})
	p.said("gone; subscribing again until that succeeds")
	none[cancelHandler](p)
	p.after(75) // 100 ms, drawn at the middle of its upper half
	if got := one[openStream](p); !slices.Equal(got.request.InFlight, []string{"a", "b"}) {
		t.Error(got.request.InFlight)
	}
}

func TestThePausesDoubleUpTo5sAndBeginAnewAfterAnAnsweredKeepAlive(t *testing.T) {
	p := newPlay(t).take(start{})
	for _, want := range []millis{75, 150, 300, 600, 1_200, 2_400, 3_750, 3_750} {
		p.take(streamEnded{p.s.stream, unavailableNow()})
		if got := p.s.openAt - p.now; got != want {
			t.Errorf("%d ms; want %d", got, want)
		}
		one[openStream](p.after(want))
	}
	p.attach().answer().take(streamEnded{p.s.stream, unavailableNow()})
	if got := p.s.openAt - p.now; got != 75 {
		t.Errorf("%d ms; want 75", got)
	}
}

func TestAnUnknownSessionIsSubscribedAgainAndTrustGoesOnToItsEnd(t *testing.T) {
	p := newPlay(t).begin().assign("a").after(5_000)
	p.take(keepAliveFailed{p.s.keepAlives, sidecarError(codes.NotFound, "SESSION_NOT_FOUND", "")})
	none[cancelHandler](p)
	one[openStream](p.after(75))
	none[sendKeepAlive](p)
	if cancel := one[cancelHandler](p.after(15_000)); cancel.reason != leaseLost {
		t.Error(cancel)
	}
}

func TestAnAssignmentThatComesAgainIsDropped(t *testing.T) {
	p := newPlay(t).begin().assign("a")
	one[startHandler](p)
	none[startHandler](p.assign("a"))
	none[startHandler](p.end("a").assign("a"))
	none[startHandler](p.after(1).assign("a"))
}

func TestOneThatFindsNoRoomIsDroppedAndNotRemembered(t *testing.T) {
	p := newPlay(t).begin().assign("a").assign("b")
	none[startHandler](p.assign("c"))
	none[startHandler](p.end("a"))
	one[startHandler](p.assign("c"))
}

func TestARunOfAJobThatWeDoNotHaveIsLoggedAndNotAccepted(t *testing.T) {
	p := newPlay(t).begin().assignAs(&anarchonv1.Assignment{Token: "a", Job: "other"})
	none[startHandler](p)
	p.said(`a run of "other", which we do not have`)
	if len(p.s.inFlight()) != 0 {
		t.Error(p.s.inFlight())
	}
}

func TestTheFirstReasonStaysAndTheEndOfTrustIsToldAgain(t *testing.T) {
	p := newPlay(t).begin().assign("a")
	if got := one[cancelHandler](p.cancelEvent("a", isTimeout)); !got.trusted || got.reason != isTimeout {
		t.Error(got)
	}
	none[cancelHandler](p.cancelEvent("a", isRequested))
	if got := one[cancelHandler](p.cancelEvent("a", isFenced)); got.trusted {
		t.Error(got)
	}
	none[cancelHandler](p.cancelEvent("a", leaseLost))
	none[cancelHandler](p.cancelEvent("gone", isTimeout))
}

func TestWhatIsHeldAndGetsCancelledIsReportedStopped(t *testing.T) {
	p := newPlay(t).take(start{}).attach().assign("a").cancelEvent("a", isRequested)
	sent := one[sendResults](p)
	if got := sent.request.Results[0].GetOutcome().GetStopped(); got.GetReason() != isRequested {
		t.Error(got)
	}
	none[startHandler](p.answer())
}

func TestALostAttemptIsCancelledForTheReasonGiven(t *testing.T) {
	p := newPlay(t).begin().assign("a").assign("b").after(5_000)
	got := all[cancelHandler](p.answer(lost("a", isFenced), lost("b", 0)))
	if len(got) != 2 || got[0].reason != isFenced || got[1].reason != leaseLost || got[0].trusted || got[1].trusted {
		t.Error(got)
	}
}

func TestResultsThatEndTogetherGoTogetherOneCallAtATime(t *testing.T) {
	p := newPlay(t).begin().assign("a").assign("b").end("a")
	first := one[sendResults](p)
	none[sendResults](p.end("b"))
	p.take(resultsAnswered{first.tokens, &anarchonv1.CompleteResponse{
		Receipts: []*anarchonv1.Receipt{{Status: recorded}},
	}})
	if got := one[sendResults](p); !slices.Equal(got.tokens, []string{"b"}) {
		t.Error(got.tokens)
	}
	p.receipts(recorded)
	if len(p.s.inFlight()) != 0 {
		t.Error(p.s.inFlight())
	}
}

func TestAResultIsRepeatedUntilItHasAReceipt(t *testing.T) {
	p := newPlay(t).begin().assign("a").end("a").receipts(notNow)
	none[sendResults](p)
	p.after(75).receipts(99) // a status of a later version
	p.after(150)
	p.take(resultsFailed{one[sendResults](p).tokens, unavailableNow()})
	p.after(300).receipts() // none at all
	p.after(600).receipts(recorded)
	none[sendResults](p.after(1_000))
}

func TestAResultThatDidNotCountIsAWarning(t *testing.T) {
	p := newPlay(t).begin().assign("a").end("a").receipts(wasFenced)
	p.said("the result of job 5 attempt 1 did not count: its attempt no longer held the lease")
	none[sendResults](p.after(1_000))
}

func TestARefusedBatchGoesAgainOneByOne(t *testing.T) {
	p := newPlay(t).begin().assign("a").assign("b").end("a")
	first := one[sendResults](p)
	p.end("b").take(resultsFailed{first.tokens, unavailableNow()})
	p.after(100)
	var batch sendResults
	for _, sent := range all[sendResults](p) {
		batch = sent
	}
	p.take(resultsFailed{[]string{"a", "b"}, sidecarError(codes.InvalidArgument, "", "too odd")})
	if batch = one[sendResults](p); len(batch.tokens) != 1 {
		t.Fatal(batch.tokens)
	}
	p.take(resultsFailed{batch.tokens, sidecarError(codes.InvalidArgument, "", "too odd")})
	p.said("is refused: too odd")
	p.receipts(recorded)
	if len(p.s.inFlight()) != 0 {
		t.Error(p.s.inFlight())
	}
}

func TestAResultIsGivenUpAfter5MinutesOrItsLease(t *testing.T) {
	for lease, want := range map[time.Duration]millis{
		30 * time.Second: 5 * 60_000, 20 * time.Minute: 20 * 60_000, 3 * time.Hour: 60 * 60_000,
	} {
		p := newPlay(t).begin().assignAs(&anarchonv1.Assignment{
			Token: "a", Job: "job", LeaseEndTime: timestamppb.New(time.UnixMilli(0).Add(lease)),
		}).end("a")
		p.take(resultsFailed{[]string{"a"}, unavailableNow()})
		p.s.isSending = true // so that only the giving up counts
		p.after(want - 1)
		if len(p.s.inFlight()) != 1 {
			t.Errorf("%v: given up early", lease)
		}
		p.after(1)
		p.said("and is given up")
	}
}

func TestLeavingWaitsForTheGraceThenCancelsThenCloses(t *testing.T) {
	p := newPlay(t, Every("job", time.Second, nothing), Every("brief", time.Second, nothing, StopGrace(time.Second)))
	p.begin().assign("a").assignAs(&anarchonv1.Assignment{Token: "b", Job: "brief"})
	p.take(stopAsked{grace: 20_000})
	if !one[sendKeepAlive](p).request.Draining {
		t.Error("not draining")
	}
	p.said("stopping: waiting up to 20s for 2 handlers (brief, job)")
	p.answer()
	if got := one[cancelHandler](p.after(1_000)); got.token != "b" || got.reason != isShutdown || !got.trusted {
		t.Error(got)
	}
	none[startHandler](p.assign("c"))
	p.take(handlerEnded{"b", stoppedOutcome(isShutdown)})
	p.receipts(recorded)
	p.end("a").receipts(recorded)
	if got := one[sendClose](p); !slices.Equal(got.request.Stopped, []string{"c"}) {
		t.Error(got)
	}
	if got := one[closed](p.take(closeEnded{})); got.err != nil {
		t.Error(got)
	}
	if p.s.wakeAt() != never {
		t.Error("it still wants to be woken")
	}
}

func TestASecondStopCanOnlyShortenTheGrace(t *testing.T) {
	p := newPlay(t).begin().assign("a").take(stopAsked{grace: 10_000}).take(stopAsked{grace: 60_000})
	if p.s.graceEnd != p.now+10_000 {
		t.Error(p.s.graceEnd - p.now)
	}
	if got := one[cancelHandler](p.take(stopAsked{grace: 0})); got.reason != isShutdown {
		t.Error(got)
	}
}

func TestAHandlerThatDoesNotStopIsLeftToItsLease(t *testing.T) {
	p := newPlay(t).begin().assign("a").take(stopAsked{grace: 0}).answer()
	none[sendClose](p.after(4_999))
	p.after(1)
	p.said("handlers that did not stop are left to their leases: job 5 attempt 1")
	if got := one[sendClose](p); len(got.request.Stopped) != 0 {
		t.Error(got)
	}
}

func TestWithoutASessionThereIsNothingToClose(t *testing.T) {
	p := newPlay(t).take(start{}).take(stopAsked{grace: 0})
	none[sendClose](p)
	one[closed](p)
}

func TestWhatTheSidecarRefusesEndsTheSession(t *testing.T) {
	p := newPlay(t).take(start{})
	p.take(streamEnded{p.s.stream, sidecarError(codes.InvalidArgument, "", "jobs[0]: no")})
	if got := one[closed](p); !errors.Is(got.err, ErrRefused) {
		t.Error(got)
	}
	p = newPlay(t).begin().assign("a")
	p.take(streamEnded{p.s.stream, sidecarError(codes.FailedPrecondition, "UNSUPPORTED", "no")})
	if got := one[cancelHandler](p); got.reason != isShutdown {
		t.Error(got)
	}
}

func TestWrongCredentialsEndASessionOnlyInTheBeginning(t *testing.T) {
	wrong := sidecarError(codes.Unauthenticated, "BAD_CREDENTIALS", "no")
	p := newPlay(t).take(start{})
	if got := one[closed](p.take(streamEnded{p.s.stream, wrong})); !errors.Is(got.err, ErrCredentials) {
		t.Error(got)
	}
	p = newPlay(t).begin()
	none[closed](p.take(streamEnded{p.s.stream, wrong}))
	one[openStream](p.after(75))
}

func TestAReplacedSessionIsNotClosed(t *testing.T) {
	p := newPlay(t).begin()
	p.take(streamEnded{p.s.stream, sidecarError(codes.Aborted, "SESSION_REPLACED", "taken")})
	none[sendClose](p)
	if got := one[closed](p); !errors.Is(got.err, ErrSessionReplaced) {
		t.Error(got)
	}
}

func TestConfirmIsAnsweredByAKeepAliveOfItsOwn(t *testing.T) {
	p := newPlay(t).begin().assign("a").take(confirmAsked{"a", 1})
	if got := one[sendKeepAlive](p); !slices.Equal(got.request.Confirm, []string{"a"}) {
		t.Error(got)
	}
	none[sendKeepAlive](p.take(confirmAsked{"a", 2})) // goes with the next
	p.answer(func(r *anarchonv1.KeepAliveResponse) { r.Confirmed = []string{"a"} })
	if got := one[answerConfirm](p); got.ticket != 1 || got.err != nil {
		t.Error(got)
	}
	one[sendKeepAlive](p)
	if got := one[answerConfirm](p.answer()); got.ticket != 2 || !errors.Is(got.err, ErrNotConfirmed) {
		t.Error(got)
	}
	p.take(confirmAsked{"a", 3})
	if got := one[answerConfirm](p.answer(lost("a", isFenced))); !errors.Is(got.err, ErrFenced) {
		t.Error(got)
	}
	if got := one[answerConfirm](p.take(confirmAsked{"a", 4})); !errors.Is(got.err, ErrLeaseLost) {
		t.Error(got)
	}
}

func TestConfirmWithoutASessionIsAnsweredAtOnce(t *testing.T) {
	p := newPlay(t).begin().assign("a").after(5_000)
	p.take(keepAliveFailed{p.s.keepAlives, sidecarError(codes.NotFound, "SESSION_NOT_FOUND", "")})
	if got := one[answerConfirm](p.take(confirmAsked{"a", 1})); !errors.Is(got.err, ErrNotConfirmed) {
		t.Error(got)
	}
}

func TestEventsOfAnEarlierStreamAreNotHeard(t *testing.T) {
	p := newPlay(t).begin()
	old := p.s.stream
	p.take(streamEnded{old, unavailableNow()}).after(75)
	p.take(streamEvent{old, &anarchonv1.SubscribeResponse{Event: &anarchonv1.SubscribeResponse_Attached{
		Attached: &anarchonv1.Attached{},
	}}})
	if p.s.state != subscribing {
		t.Error(p.s.state)
	}
}

func TestAnUnknownEventChangesNothing(t *testing.T) {
	p := newPlay(t).begin().event(&anarchonv1.SubscribeResponse{})
	if len(p.out) != 0 {
		t.Error(p.out)
	}
}

func TestTheIntervalOfAnAnswerCountsFromTheSending(t *testing.T) {
	p := newPlay(t).begin().after(5_000)
	sentAt := p.now
	p.after(300).answer(func(r *anarchonv1.KeepAliveResponse) {
		r.KeepAliveInterval = durationpb.New(time.Second)
	})
	if p.s.keepAliveAt != sentAt+1_000 {
		t.Error(p.s.keepAliveAt - sentAt)
	}
	p.answer2(func(r *anarchonv1.KeepAliveResponse) { r.KeepAliveInterval = durationpb.New(time.Millisecond) })
	if p.s.interval != keepAliveIntervalMin {
		t.Error(p.s.interval)
	}
}

// answer2 lets a keep-alive fall due first.
func (p *play) answer2(change func(*anarchonv1.KeepAliveResponse)) *play {
	p.Helper()
	return p.after(1_000).answer(change)
}

func TestTheExitComesOneIntervalAfterTrustAndOnlyWhileAHandlerRuns(t *testing.T) {
	p := newPlay(t).begin()
	if p.s.exitAt() != never {
		t.Error("nothing runs")
	}
	p.assign("a")
	if got, want := p.s.exitAt(), p.s.trustEnd+5_000; got != want {
		t.Error(got - want)
	}
	p.after(5_000).answer(lost("a", isFenced))
	at := p.now + 5_000
	p.after(1_000).after(4_000).answer()
	if p.s.exitAt() != at {
		t.Error("set anew for an attempt that is lost")
	}
}

func TestTooManyNamesAreNotAllSaid(t *testing.T) {
	names := make([]string, 7)
	for i := range names {
		names[i] = fmt.Sprint(i)
	}
	if got := listed(names); got != "0, 1, 2, 3, 4 and 2 more" {
		t.Error(got)
	}
}

func TestAnAnswerThatWasOvertakenExtendsNoTrust(t *testing.T) {
	p := newPlay(t).begin().after(5_000)
	overtaken := p.s.keepAlives
	p.after(5_000).answer()
	end := p.s.trustEnd
	p.take(keepAliveAnswered{overtaken, &anarchonv1.KeepAliveResponse{
		SessionTtl: durationpb.New(time.Minute), StreamOpen: true,
	}})
	if p.s.trustEnd != end {
		t.Error(p.s.trustEnd - end)
	}
}

func TestTheErrorThatCameFirstEndsTheSession(t *testing.T) {
	p := newPlay(t).begin().assign("a").after(5_000)
	p.take(streamEnded{p.s.stream, sidecarError(codes.InvalidArgument, "", "first")})
	p.take(keepAliveFailed{p.s.keepAlives, sidecarError(codes.InvalidArgument, "", "second")})
	p.end("a").receipts(recorded)
	if got := one[closed](p.take(closeEnded{})); got.err == nil || got.err.Error() != "first" {
		t.Error(got.err)
	}
}

func TestTokensAreRememberedUpToTheConcurrencyAnd1024More(t *testing.T) {
	p := newPlay(t).begin()
	const remembered = 2 + 1_024
	for n := range remembered + 1 {
		one[startHandler](p.assign(fmt.Sprint(n)))
		p.end(fmt.Sprint(n)).receipts(recorded)
	}
	none[startHandler](p.assign("1"))
	one[startHandler](p.assign("0"))
}

func TestWhatIsHeldIsDroppedWhenAKeepAliveFails(t *testing.T) {
	p := newPlay(t).take(start{}).attach().assign("a")
	p.take(keepAliveFailed{p.s.keepAlives, unavailableNow()}).after(5_000)
	none[startHandler](p.answer())
	one[startHandler](p.assign("a"))
}

func TestALossIsSaidOnceUntilItIsAttachedAgain(t *testing.T) {
	p := newPlay(t).begin().take(streamEnded{noStream, unavailableNow()})
	p.take(streamEnded{p.s.stream, unavailableNow()})
	p.said("subscribing again")
	p.after(75).take(streamEnded{p.s.stream, unavailableNow()})
	none[say](p)
	p.after(150).attach()
	p.said("attached again, to instance one")
}

func TestABatchHasAtMost1000Results(t *testing.T) {
	p := newPlay(t)
	p.s.request.MaxConcurrency = 2_000
	p.begin()
	for n := range 1_002 {
		p.assign(fmt.Sprint(n))
	}
	first := one[sendResults](p.end("0"))
	for n := 1; n < 1_002; n++ {
		p.end(fmt.Sprint(n))
	}
	p.take(resultsAnswered{first.tokens, &anarchonv1.CompleteResponse{
		Receipts: []*anarchonv1.Receipt{{Status: recorded}},
	}})
	if got := one[sendResults](p); len(got.tokens) != 1_000 {
		t.Error(len(got.tokens))
	}
}

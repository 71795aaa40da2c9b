package anarchon

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

// For users' own tests: TestRun is one attempt for one handler, FakeSidecar a sidecar's puppet for a
// whole client. Both need no sidecar, no network and no waiting.

// TestRun says what a handler under test is to be given. Zero values are defaults.
type TestRun struct {
	Job        string // "job"
	Slot       int64  // a moment in 2026
	Attempt    int    // 1
	Fence      int64  // the slot in microseconds
	InstanceID string // "test"
	Trigger    Trigger
	Payload    []byte
	// Timeout: none.
	Timeout time.Duration
	// Confirm answers [Run.Confirm]. nil: it is confirmed.
	Confirm func(context.Context) error
	// Log: [slog.Default].
	Log *slog.Logger
}

const (
	testSlot  = 1_791_633_610_000 // 2026-10-10T12:00:10Z
	longTrust = never / 2
)

// Start returns what a handler is called with, and what cancels it for a reason: [ReasonLeaseLost] and
// [ReasonFenced] end its trust as well.
func (t TestRun) Start(parent context.Context) (context.Context, *Run, func(CancelReason)) {
	assignment := &anarchonv1.Assignment{
		Token: "test", Job: firstOf(t.Job, "job"), Slot: t.Slot, Attempt: int32(max(t.Attempt, 1)),
		Fence: t.Fence, InstanceId: firstOf(t.InstanceID, "test"), Payload: t.Payload,
		Trigger: anarchonv1.Trigger_TRIGGER_SCHEDULE,
	}
	if t.Slot == 0 {
		assignment.Slot = testSlot
	}
	if t.Fence == 0 {
		assignment.Fence = assignment.Slot * 1_000
	}
	for wire, trigger := range triggers {
		if trigger == t.Trigger {
			assignment.Trigger = wire
		}
	}
	if t.Timeout > 0 {
		assignment.Timeout = durationpb.New(t.Timeout)
	}
	confirm := t.Confirm
	if confirm == nil {
		confirm = func(context.Context) error { return nil }
	}
	log := t.Log
	if log == nil {
		log = slog.Default()
	}
	ctx, stop := context.WithCancelCause(parent)
	trust := &trust{}
	trust.set(longTrust)
	orders := newOrders(bootClock{}, trust, stop)
	cancel := func(reason CancelReason) {
		wire := wireReason(reason)
		orders.cancel(wire, "", !endsTrust(wire))
	}
	return ctx, newRun(assignment, orders, confirm, log), cancel
}

// Result returns what [Run.SetResult] set, as it would be kept.
func (r *Run) Result() string { return cut(r.resultText(), resultMaxBytes) }

func wireReason(reason CancelReason) anarchonv1.CancelReason {
	for wire, known := range reasons {
		if known == reason {
			return wire
		}
	}
	return anarchonv1.CancelReason_CANCEL_REASON_UNSPECIFIED
}

// FakeSidecar stands in for a sidecar: give it to a client by [WithFakeSidecar]. It attaches, hands
// out what the test says, answers keep-alives, records results, and shows what it was sent. Safe in
// any goroutine; for one client with one subscription.
type FakeSidecar struct {
	mutex    sync.Mutex
	changed  chan struct{} // closed and made anew at each change
	isAway   bool
	stream   chan *anarchonv1.SubscribeResponse // nil: none is open
	broken   chan struct{}
	owned    map[string]bool
	runs     int
	seen     []*anarchonv1.SubscribeRequest
	alive    []*anarchonv1.KeepAliveRequest
	outcomes map[string]*anarchonv1.Outcome
	closed   *anarchonv1.CloseSessionRequest
}

// NewFakeSidecar returns a sidecar that is there, with nothing to do.
func NewFakeSidecar() *FakeSidecar {
	return &FakeSidecar{
		changed: make(chan struct{}), owned: map[string]bool{}, outcomes: map[string]*anarchonv1.Outcome{},
	}
}

// WithFakeSidecar makes a client talk to the fake, whatever its address says.
func WithFakeSidecar(fake *FakeSidecar) Option {
	return func(s *settings) { s.transport = fakeTransport{fake} }
}

const (
	fakeInstance  = "fake"
	fakeTTL       = 15 * time.Second
	fakeKeepAlive = 5 * time.Second
)

// Assign hands out a run of the job with the payload, as soon as the client is attached, and returns
// its token.
func (f *FakeSidecar) Assign(ctx context.Context, job string, payload []byte) (token string, err error) {
	err = f.until(ctx, "the client to be attached and to keep itself alive", func() bool {
		return f.stream != nil && len(f.alive) > 0
	})
	if err != nil {
		return "", err
	}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.runs++
	token = fmt.Sprintf("run-%d", f.runs)
	f.owned[token] = true
	slot := int64(testSlot + f.runs*1_000)
	f.send(&anarchonv1.SubscribeResponse{Event: &anarchonv1.SubscribeResponse_Runs{
		Runs: &anarchonv1.Assignments{Assignments: []*anarchonv1.Assignment{{
			Token: token, Job: job, Slot: slot, Attempt: 1, Fence: slot * 1_000,
			Trigger: anarchonv1.Trigger_TRIGGER_MANUAL, InstanceId: fakeInstance, Payload: payload,
		}}},
	}})
	return token, nil
}

// Cancel tells the client to stop an attempt.
func (f *FakeSidecar) Cancel(token string, reason CancelReason) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.send(&anarchonv1.SubscribeResponse{Event: &anarchonv1.SubscribeResponse_Cancel{
		Cancel: &anarchonv1.Cancellation{Token: token, Reason: wireReason(reason)},
	}})
}

// Lose makes the sidecar no longer own an attempt: the next answer to a keep-alive says so.
func (f *FakeSidecar) Lose(token string) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	delete(f.owned, token)
}

// BreakStream ends the client's stream; the client subscribes again.
func (f *FakeSidecar) BreakStream() {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.breakStream()
}

// GoAway makes the sidecar unavailable until ComeBack.
func (f *FakeSidecar) GoAway() {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.isAway = true
	f.breakStream()
}

// ComeBack ends GoAway.
func (f *FakeSidecar) ComeBack() {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.isAway = false
	f.tell()
}

// Outcome waits for how an attempt ended.
func (f *FakeSidecar) Outcome(ctx context.Context, token string) (*anarchonv1.Outcome, error) {
	err := f.until(ctx, "the outcome of "+token, func() bool { return f.outcomes[token] != nil })
	if err != nil {
		return nil, err
	}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return f.outcomes[token], nil
}

// Subscribes waits until the client has subscribed this often, and returns the requests.
func (f *FakeSidecar) Subscribes(ctx context.Context, count int) ([]*anarchonv1.SubscribeRequest, error) {
	err := f.until(ctx, "the client to subscribe", func() bool { return len(f.seen) >= count })
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return slices.Clone(f.seen), err
}

// KeepAlives waits until the client has kept itself alive this often, and returns the requests.
func (f *FakeSidecar) KeepAlives(ctx context.Context, count int) ([]*anarchonv1.KeepAliveRequest, error) {
	err := f.until(ctx, "a keep-alive", func() bool { return len(f.alive) >= count })
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return slices.Clone(f.alive), err
}

// Closed returns the request that closed the session; nil: none yet.
func (f *FakeSidecar) Closed() *anarchonv1.CloseSessionRequest {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return f.closed
}

// until waits for what holds.
func (f *FakeSidecar) until(ctx context.Context, what string, holds func() bool) error {
	for {
		f.mutex.Lock()
		isSo, changed := holds(), f.changed
		f.mutex.Unlock()
		if isSo {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("waited for %s: %w", what, context.Cause(ctx))
		}
	}
}

func (f *FakeSidecar) tell() {
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *FakeSidecar) breakStream() {
	if f.stream != nil {
		close(f.broken)
		f.stream = nil
	}
	f.tell()
}

func (f *FakeSidecar) send(event *anarchonv1.SubscribeResponse) {
	if f.stream != nil {
		f.stream <- event
	}
}

// fakeTransport is the fake as the client calls it.
type fakeTransport struct{ *FakeSidecar }

const fakeEventsMax = 1_024

func (f fakeTransport) subscribe(
	ctx context.Context, request *anarchonv1.SubscribeRequest, take func(*anarchonv1.SubscribeResponse),
) *SidecarError {
	if err := f.until(ctx, "the sidecar", func() bool { return !f.isAway }); err != nil {
		return unavailable("%v", err)
	}
	f.mutex.Lock()
	f.seen = append(f.seen, request)
	events, broken := make(chan *anarchonv1.SubscribeResponse, fakeEventsMax), make(chan struct{})
	f.stream, f.broken = events, broken
	f.send(&anarchonv1.SubscribeResponse{Event: &anarchonv1.SubscribeResponse_Attached{
		Attached: &anarchonv1.Attached{
			InstanceId: fakeInstance, KeepAliveInterval: durationpb.New(fakeKeepAlive),
			SessionTtl: durationpb.New(fakeTTL), Lost: f.lostOf(request.GetInFlight()),
		},
	}})
	f.tell()
	f.mutex.Unlock()
	for {
		select {
		case event := <-events:
			take(event)
		case <-broken:
			return unavailable("the stream is broken")
		case <-ctx.Done():
			return unavailable("the client has ended the stream")
		}
	}
}

func (f fakeTransport) keepAlive(
	_ context.Context, request *anarchonv1.KeepAliveRequest,
) (*anarchonv1.KeepAliveResponse, *SidecarError) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.isAway {
		return nil, unavailable("the sidecar is away")
	}
	if len(f.seen) == 0 {
		return nil, sidecarError(codes.NotFound, "SESSION_NOT_FOUND", "no such session")
	}
	f.alive = append(f.alive, request)
	f.tell()
	response := &anarchonv1.KeepAliveResponse{
		SessionTtl: durationpb.New(fakeTTL), StreamOpen: f.stream != nil, Lost: f.lostOf(request.GetInFlight()),
	}
	for _, token := range request.GetConfirm() {
		if f.owned[token] {
			response.Confirmed = append(response.Confirmed, token)
		}
	}
	return response, nil
}

func (f *FakeSidecar) lostOf(tokens []string) []*anarchonv1.Cancellation {
	var lost []*anarchonv1.Cancellation
	for _, token := range tokens {
		if !f.owned[token] && f.outcomes[token] == nil {
			lost = append(lost, &anarchonv1.Cancellation{
				Token: token, Reason: anarchonv1.CancelReason_CANCEL_REASON_FENCED,
			})
		}
	}
	return lost
}

func (f fakeTransport) complete(
	_ context.Context, request *anarchonv1.CompleteRequest,
) (*anarchonv1.CompleteResponse, *SidecarError) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.isAway {
		return nil, unavailable("the sidecar is away")
	}
	response := &anarchonv1.CompleteResponse{}
	for _, result := range request.GetResults() {
		status := anarchonv1.ReceiptStatus_RECEIPT_STATUS_RECORDED
		if !f.owned[result.GetToken()] {
			status = anarchonv1.ReceiptStatus_RECEIPT_STATUS_FENCED
		}
		f.outcomes[result.GetToken()] = result.GetOutcome()
		response.Receipts = append(response.Receipts, &anarchonv1.Receipt{Status: status})
	}
	f.tell()
	return response, nil
}

func (f fakeTransport) closeSession(_ context.Context, request *anarchonv1.CloseSessionRequest) *SidecarError {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.isAway {
		return unavailable("the sidecar is away")
	}
	f.closed = request
	f.tell()
	return nil
}

func (f fakeTransport) close() {}

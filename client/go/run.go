package anarchon

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

// Trigger says what caused a run.
type Trigger string

const (
	// TriggerSchedule is the schedule.
	TriggerSchedule Trigger = "schedule"
	// TriggerManual is somebody who triggered it.
	TriggerManual Trigger = "manual"
	// TriggerCatchUp is the catch-up of a slot that was missed.
	TriggerCatchUp Trigger = "catch_up"
	// TriggerOther is a cause that this version of the client does not know.
	TriggerOther Trigger = "other"
)

// Run is one attempt at one run of a job, as its handler sees it. Safe to use in any goroutine.
type Run struct {
	// Job is the job's name.
	Job string
	// Slot is the scheduled time in milliseconds since 1970-01-01T00:00:00Z.
	Slot int64
	// Attempt is 1 at first, 2 or more after a takeover or a failure.
	Attempt int
	// Token names this attempt. Opaque.
	Token string
	// Fence grows with every claim of the job: for systems downstream that must refuse a late writer.
	Fence int64
	// InstanceID is the instance that holds the claim, as history shows it.
	InstanceID string
	// Trigger is what caused the run.
	Trigger Trigger
	// Payload is what was given when the run was triggered; empty for scheduled runs.
	Payload []byte
	// Log says of which attempt it speaks.
	Log *slog.Logger

	orders   *orders
	confirm  func(context.Context) error
	result   atomic.Pointer[string]
	deadline time.Time
	endsAt   millis // of the timeout, by the client's clock; never: no timeout
}

func newRun(
	assignment *anarchonv1.Assignment, orders *orders, confirm func(context.Context) error, log *slog.Logger,
) *Run {
	run := &Run{
		Job:        assignment.GetJob(),
		Slot:       assignment.GetSlot(),
		Attempt:    int(assignment.GetAttempt()),
		Token:      assignment.GetToken(),
		Fence:      assignment.GetFence(),
		InstanceID: assignment.GetInstanceId(),
		Trigger:    triggerOf(assignment.GetTrigger()),
		Payload:    assignment.GetPayload(),
		Log: log.With("job", assignment.GetJob(), "slot", assignment.GetSlot(),
			"attempt", assignment.GetAttempt()),
		orders:  orders,
		confirm: confirm,
		endsAt:  never,
	}
	if timeout := assignment.GetTimeout(); timeout != nil {
		length := wireToMillis(timeout)
		run.endsAt = orders.clock.now() + length
		run.deadline = time.Now().Add(length.duration())
	}
	return run
}

// ScheduledAt returns the slot as a time, in UTC.
func (r *Run) ScheduledAt() time.Time { return time.UnixMilli(r.Slot).UTC() }

// Deadline returns when the attempt's timeout is over, by this machine's clock; false: never.
func (r *Run) Deadline() (time.Time, bool) { return r.deadline, r.endsAt != never }

// Remaining returns what is left of the attempt's timeout, never less than zero; false: no limit.
func (r *Run) Remaining() (time.Duration, bool) {
	if r.endsAt == never {
		return 0, false
	}
	return max(0, r.endsAt-r.orders.clock.now()).duration(), true
}

// Check returns a [*Cancelled] if the attempt is to stop, or if its lease can no longer be trusted.
// Cheap: no call is made, and the clock is asked. nil: go on.
func (r *Run) Check() error { return r.orders.check() }

// Lost is closed when the attempt is no longer ours, which may come after the context was cancelled
// for a reason that leaves time to tidy up: from then on no further step may be taken.
func (r *Run) Lost() <-chan struct{} { return r.orders.lost }

// Confirm has the lease renewed at the store now: the thing to do just before what cannot be undone.
// It takes one round trip to the store. It returns nil, an [ErrLeaseLost] if the attempt is no longer
// ours, an [ErrNotConfirmed] if that cannot be told now, a [*Cancelled] if the attempt is to stop, or
// the error of ctx.
func (r *Run) Confirm(ctx context.Context) error {
	if err := r.Check(); err != nil {
		return err
	}
	if err := r.confirm(ctx); err != nil {
		return err
	}
	return r.Check()
}

// Sleep waits for the duration, but no longer than until ctx is done; then it returns as
// [Run.Check] does, or the cause of ctx.
func (r *Run) Sleep(ctx context.Context, duration time.Duration) error {
	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		if err := r.Check(); err != nil {
			return err
		}
		return context.Cause(ctx)
	}
	return r.Check()
}

// SetResult keeps a value with the run, where it succeeds: a text as it is, any other as JSON; the
// first 16 KiB. The last one set counts.
func (r *Run) SetResult(value any) {
	text, isText := value.(string)
	if !isText {
		var buffer strings.Builder
		encoder := json.NewEncoder(&buffer)
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(value); err != nil {
			text = fmt.Sprint(value) // what people then see
		} else {
			text = strings.TrimSuffix(buffer.String(), "\n")
		}
	}
	r.result.Store(&text)
}

func (r *Run) resultText() string {
	if text := r.result.Load(); text != nil {
		return *text
	}
	return ""
}

// ── What an attempt has been told ───────────────────────────────────────────────────────────────

// orders are what one attempt has been told, by the sidecar or by the clock. Trust that has ended
// stays ended for the attempt, also when the session regains it: in between another instance may
// have begun.
type orders struct {
	clock  clock
	trust  *trust
	stop   context.CancelCauseFunc
	lost   chan struct{}
	mutex  sync.Mutex
	told   *Cancelled // the first reason stays
	wire   anarchonv1.CancelReason
	isLost bool
}

func newOrders(clock clock, trust *trust, stop context.CancelCauseFunc) *orders {
	return &orders{clock: clock, trust: trust, stop: stop, lost: make(chan struct{})}
}

// cancel tells the attempt to stop. The first reason stays.
func (o *orders) cancel(reason anarchonv1.CancelReason, message string, trusted bool) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if o.told == nil {
		o.told = &Cancelled{reasonOf(reason), message, !trusted}
		o.wire = reason
		o.stop(o.told)
	}
	if !trusted && !o.isLost {
		o.isLost = true
		close(o.lost)
	}
}

// look lets the clock have its word: it ends the attempt's trust if its time is over.
func (o *orders) look() {
	if o.clock.now() >= o.trust.end() {
		o.cancel(anarchonv1.CancelReason_CANCEL_REASON_LEASE_LOST, notAnswered, false)
	}
}

func (o *orders) check() error {
	o.look()
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if o.told == nil {
		return nil
	}
	return &Cancelled{o.told.Reason, o.told.Message, o.isLost}
}

// reason returns what the attempt was told first; false: nothing.
func (o *orders) reason() (*Cancelled, anarchonv1.CancelReason, bool) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return o.told, o.wire, o.told != nil
}

// trust is until when the session is to be trusted. Written by the session's goroutine, read by any.
type trust struct{ at atomic.Int64 }

func (t *trust) end() millis    { return millis(t.at.Load()) }
func (t *trust) set(end millis) { t.at.Store(int64(end)) }

// ── Words ───────────────────────────────────────────────────────────────────────────────────────

var reasons = map[anarchonv1.CancelReason]CancelReason{
	anarchonv1.CancelReason_CANCEL_REASON_TIMEOUT:    ReasonTimeout,
	anarchonv1.CancelReason_CANCEL_REASON_LEASE_LOST: ReasonLeaseLost,
	anarchonv1.CancelReason_CANCEL_REASON_FENCED:     ReasonFenced,
	anarchonv1.CancelReason_CANCEL_REASON_SHUTDOWN:   ReasonShutdown,
	anarchonv1.CancelReason_CANCEL_REASON_SUPERSEDED: ReasonSuperseded,
	anarchonv1.CancelReason_CANCEL_REASON_REQUESTED:  ReasonRequested,
}

func reasonOf(wire anarchonv1.CancelReason) CancelReason {
	if reason, known := reasons[wire]; known {
		return reason
	}
	return ReasonOther
}

var triggers = map[anarchonv1.Trigger]Trigger{
	anarchonv1.Trigger_TRIGGER_SCHEDULE: TriggerSchedule,
	anarchonv1.Trigger_TRIGGER_MANUAL:   TriggerManual,
	anarchonv1.Trigger_TRIGGER_CATCH_UP: TriggerCatchUp,
}

func triggerOf(wire anarchonv1.Trigger) Trigger {
	if trigger, known := triggers[wire]; known {
		return trigger
	}
	return TriggerOther
}

// cut returns the first bytes of a text, as UTF-8 that can be sent, cut between characters.
func cut(text string, maxBytes int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= maxBytes {
		return text
	}
	return strings.ToValidUTF8(text[:maxBytes], "")
}

// cutStart returns the last bytes of a text, as UTF-8 that can be sent, cut between characters.
func cutStart(text string, maxBytes int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= maxBytes {
		return text
	}
	return strings.ToValidUTF8(text[len(text)-maxBytes:], "")
}

package anarchon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

const (
	resultMaxBytes = 16 << 10
	messageMaxSaid = 4 << 10
	traceMaxBytes  = 16 << 10
)

// attempt is an attempt whose handler runs.
type attempt struct {
	run       *Run
	orders    *orders
	startedAt millis
}

// runner runs the handlers of one session, each in a goroutine of its own.
type runner struct {
	jobs    map[string]Job
	clock   clock
	trust   *trust
	log     *slog.Logger
	onEnd   func(token string, outcome *anarchonv1.Outcome) // in the handler's goroutine
	onLate  func()                                          // a handler has ended after abandon
	confirm func(ctx context.Context, token string) error

	mutex       sync.Mutex
	attempts    map[string]*attempt
	isAbandoned bool
}

// start runs the handler of an attempt.
func (r *runner) start(assignment *anarchonv1.Assignment) {
	job, token := r.jobs[assignment.GetJob()], assignment.GetToken()
	ctx, stop := context.WithCancelCause(context.Background())
	orders := newOrders(r.clock, r.trust, stop)
	confirm := func(ctx context.Context) error { return r.confirm(ctx, token) }
	run := newRun(assignment, orders, confirm, r.log)
	r.mutex.Lock()
	r.attempts[token] = &attempt{run: run, orders: orders, startedAt: r.clock.now()}
	r.mutex.Unlock()
	go func() {
		// What is still so where the handler ends its goroutine, as testing's FailNow does.
		var err error = &panicked{value: "the handler called runtime.Goexit"}
		defer func() {
			if value := recover(); value != nil {
				err = &panicked{value, string(debug.Stack())}
			}
			r.ended(token, outcomeOf(err, run))
			stop(nil)
		}()
		err = job.handler(ctx, run)
	}()
}

// cancel tells a handler to stop, or that its trust has ended.
func (r *runner) cancel(token string, reason anarchonv1.CancelReason, message string, trusted bool) {
	r.mutex.Lock()
	attempt := r.attempts[token]
	r.mutex.Unlock()
	if attempt != nil { // else it has just ended
		attempt.orders.cancel(reason, message, trusted)
	}
}

// abandon tells all that is left that nobody renews its lease any more. Its results are lost.
func (r *runner) abandon() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.isAbandoned = true
	for _, attempt := range r.attempts {
		attempt.orders.cancel(anarchonv1.CancelReason_CANCEL_REASON_LEASE_LOST, "the client has stopped", false)
	}
}

func (r *runner) isRunning() bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return len(r.attempts) > 0
}

func (r *runner) ended(token string, outcome *anarchonv1.Outcome) {
	r.mutex.Lock()
	attempt := r.attempts[token]
	delete(r.attempts, token)
	isLate := r.isAbandoned
	r.mutex.Unlock()
	if isLate {
		r.onLate()
		attempt.run.Log.Warn("ended after its client had stopped: its result is lost")
		return
	}
	outcome.Elapsed = durationpb.New((r.clock.now() - attempt.startedAt).duration())
	r.onEnd(token, outcome)
	// After the report: what the application's logging does must not hold it up.
	tell(attempt, outcome)
}

// tell logs how an attempt ended that has not succeeded: the application's people look there first.
func tell(attempt *attempt, outcome *anarchonv1.Outcome) {
	if failure := outcome.GetFailure(); failure != nil {
		log := attempt.run.Log.With("type", failure.GetType())
		if failure.GetRetryAfter() != nil {
			log.Warn("failed, to be tried again: " + failure.GetMessage())
			return
		}
		if trace := failure.GetStackTrace(); trace != failure.GetMessage() {
			log = log.With("stack", trace)
		}
		log.Error("failed: " + failure.GetMessage())
	} else if outcome.GetStopped() != nil {
		told, _, _ := attempt.orders.reason()
		level := slog.LevelWarn
		switch told.Reason {
		case ReasonShutdown, ReasonSuperseded, ReasonRequested:
			level = slog.LevelInfo
		}
		attempt.run.Log.Log(context.Background(), level, fmt.Sprintf("stopped (%v)", told))
	}
}

// ── Outcomes ────────────────────────────────────────────────────────────────────────────────────

// panicked is the failure of a handler that panicked, or that ended its goroutine.
type panicked struct {
	value any
	stack string
}

func (p *panicked) Error() string { return fmt.Sprintf("panic: %v", p.value) }

// outcomeOf returns how an attempt ended whose handler returned err.
func outcomeOf(err error, run *Run) *anarchonv1.Outcome {
	if err == nil {
		success := &anarchonv1.Success{Result: cut(run.resultText(), resultMaxBytes)}
		return &anarchonv1.Outcome{Result: &anarchonv1.Outcome_Success{Success: success}}
	}
	_, wire, wasTold := run.orders.reason()
	if wasTold && (errors.Is(err, context.Canceled) || errors.Is(err, ErrCancelled)) {
		return stoppedOutcome(wire)
	}
	failure := &anarchonv1.Failure{
		Type: cut(typeOf(err), messageMaxSaid), Message: cut(shown("%v", err), messageMaxSaid),
		// Errors that carry their stack, as those of github.com/pkg/errors do, show it so.
		StackTrace: cutStart(shown("%+v", err), traceMaxBytes),
	}
	var retry *RetryError
	if errors.As(err, &retry) && retry.After > 0 {
		failure.RetryAfter = durationpb.New(retry.After)
	}
	var permanent *PermanentError
	failure.Permanent = errors.As(err, &permanent)
	var panicked *panicked
	if errors.As(err, &panicked) {
		failure.Type = "panic"
		failure.StackTrace = cutStart(panicked.stack, traceMaxBytes)
	}
	return &anarchonv1.Outcome{Result: &anarchonv1.Outcome_Failure{Failure: failure}}
}

// shown is an error in a format; its own code may panic, which fmt then says.
func shown(format string, err error) string { return fmt.Sprintf(format, err) }

// ── The end of a process whose lease is lost ────────────────────────────────────────────────────

// exitTimer ends the process at a given time, whatever the handlers do.
type exitTimer struct {
	clock clock
	exit  func(code int)

	mutex sync.Mutex
	at    millis
	timer *time.Timer
}

// set ends the process at that time; never: do not.
func (e *exitTimer) set(at millis) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if at == e.at && e.timer != nil {
		return
	}
	if e.timer != nil {
		e.timer.Stop()
		e.timer = nil
	}
	e.at = at
	if at != never {
		e.timer = time.AfterFunc(max(0, min(at-e.clock.now(), watchEvery)).duration(), e.look)
	}
}

// look ends the process if it is time; a timer does not count the machine's sleep, so it looks every second.
func (e *exitTimer) look() {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if e.timer == nil {
		return
	}
	left := e.at - e.clock.now()
	if left <= 0 {
		e.exit(1)
		return
	}
	e.timer.Reset(min(left, watchEvery).duration())
}

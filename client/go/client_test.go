package anarchon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

// A whole client with a fake sidecar: what handlers are given, and what becomes of what they return.

const patience = 30 * time.Second

func patient(t *testing.T) context.Context {
	ctx, end := context.WithTimeout(context.Background(), patience)
	t.Cleanup(end)
	return ctx
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// subscribed returns a client's subscription that is ready, with its sidecar.
func subscribed(t *testing.T, handler Handler, options ...Option) (*FakeSidecar, *Subscription) {
	t.Helper()
	fake := NewFakeSidecar()
	client, err := New(append([]Option{WithFakeSidecar(fake), WithLogger(quiet)}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	subscription, err := client.Subscribe(Every("job", time.Hour, handler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		subscription.Stop(0)
		_ = subscription.Wait() // what it ended with is the test's to say
	})
	if instance, err := subscription.Ready(patient(t)); err != nil || instance != "fake" {
		t.Fatal(instance, err)
	}
	return fake, subscription
}

// outcome runs the handler once.
func outcome(t *testing.T, payload string, handler Handler) *anarchonv1.Outcome {
	t.Helper()
	fake, _ := subscribed(t, handler)
	return wait(t, fake, assign(t, fake, payload))
}

func assign(t *testing.T, fake *FakeSidecar, payload string) string {
	t.Helper()
	token, err := fake.Assign(patient(t), "job", []byte(payload))
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func wait(t *testing.T, fake *FakeSidecar, token string) *anarchonv1.Outcome {
	t.Helper()
	outcome, err := fake.Outcome(patient(t), token)
	if err != nil {
		t.Fatal(err)
	}
	return outcome
}

type ownError struct{}

func (ownError) Error() string { return strings.Repeat("Ω", 4_096) }

type brokenError struct{}

func (brokenError) Error() string { panic("broken") }

func TestWhatAHandlerReturnsIsTheOutcome(t *testing.T) {
	for name, each := range map[string]struct {
		handler Handler
		fits    func(*anarchonv1.Outcome) bool
	}{
		"nothing": {nothing, func(o *anarchonv1.Outcome) bool { return o.GetSuccess() != nil && o.GetElapsed() != nil }},
		"a text": {func(_ context.Context, r *Run) error {
			r.SetResult("got " + string(r.Payload))
			return nil
		}, func(o *anarchonv1.Outcome) bool { return o.GetSuccess().GetResult() == "got it" }},
		"a value": {func(_ context.Context, r *Run) error {
			r.SetResult(map[string]any{"rows": 3, "name": "<Ωmega>"})
			return nil
		}, func(o *anarchonv1.Outcome) bool { return o.GetSuccess().GetResult() == `{"name":"<Ωmega>","rows":3}` }},
		"a value that is no JSON": {func(_ context.Context, r *Run) error {
			r.SetResult(func() {})
			return nil
		}, func(o *anarchonv1.Outcome) bool { return o.GetSuccess().GetResult() != "" }},
		"a long text": {func(_ context.Context, r *Run) error {
			r.SetResult("x" + strings.Repeat("Ω", 16<<10))
			return nil
		}, func(o *anarchonv1.Outcome) bool { return len(o.GetSuccess().GetResult()) == 16<<10-1 }},
		"an error": {func(context.Context, *Run) error { return ownError{} }, func(o *anarchonv1.Outcome) bool {
			f := o.GetFailure()
			return f.GetType() == "anarchon.ownError" && len(f.GetMessage()) == 4_096 && !f.GetPermanent() && f.GetRetryAfter() == nil
		}},
		"an error that cannot be shown": {func(context.Context, *Run) error { return brokenError{} },
			func(o *anarchonv1.Outcome) bool {
				return strings.Contains(o.GetFailure().GetMessage(), "PANIC=Error method: broken")
			}},
		"a retry": {func(context.Context, *Run) error { return fmt.Errorf("wrapped: %w", Retry(ownError{}, time.Minute)) },
			func(o *anarchonv1.Outcome) bool { return o.GetFailure().GetRetryAfter().AsDuration() == time.Minute }},
		"a retry as the policy has it": {func(context.Context, *Run) error { return Retry(errors.New("again"), 0) },
			func(o *anarchonv1.Outcome) bool {
				f := o.GetFailure()
				return f.GetMessage() == "again" && f.GetType() == "errors.errorString" && f.GetRetryAfter() == nil
			}},
		"a retry after nonsense": {func(context.Context, *Run) error { return Retry(nil, -time.Second) },
			func(o *anarchonv1.Outcome) bool {
				return strings.Contains(o.GetFailure().GetMessage(), "must be at least 1ms")
			}},
		"a permanent error": {func(context.Context, *Run) error { return Permanent(ownError{}) },
			func(o *anarchonv1.Outcome) bool {
				return o.GetFailure().GetPermanent() && o.GetFailure().GetType() == "anarchon.ownError"
			}},
		"a panic": {func(context.Context, *Run) error { panic("oh") }, func(o *anarchonv1.Outcome) bool {
			f := o.GetFailure()
			return f.GetType() == "panic" && f.GetMessage() == "panic: oh" && strings.Contains(f.GetStackTrace(), "client_test.go")
		}},
		"the end of its goroutine": {func(context.Context, *Run) error {
			runtime.Goexit()
			return nil
		}, func(o *anarchonv1.Outcome) bool { return strings.Contains(o.GetFailure().GetMessage(), "Goexit") }},
		"a cancellation that nobody asked for": {func(context.Context, *Run) error { return context.Canceled },
			func(o *anarchonv1.Outcome) bool { return o.GetFailure() != nil }},
	} {
		t.Run(name, func(t *testing.T) {
			if got := outcome(t, "it", each.handler); !each.fits(got) {
				t.Error(got)
			}
		})
	}
}

func TestAHandlerLearnsWhyItIsToStop(t *testing.T) {
	for reason, isLost := range map[CancelReason]bool{
		ReasonTimeout: false, ReasonRequested: false, ReasonSuperseded: false, ReasonShutdown: false,
		ReasonLeaseLost: true, ReasonFenced: true,
	} {
		t.Run(string(reason), func(t *testing.T) {
			started, seen := make(chan struct{}), make(chan error, 1)
			fake, _ := subscribed(t, func(ctx context.Context, run *Run) error {
				close(started)
				<-ctx.Done()
				seen <- run.Check()
				return ctx.Err()
			})
			token := assign(t, fake, "")
			<-started
			fake.Cancel(token, reason)
			err := <-seen
			var cancelled *Cancelled
			if !errors.As(err, &cancelled) || cancelled.Reason != reason || !errors.Is(err, ErrCancelled) ||
				errors.Is(err, ErrLeaseLost) != isLost || errors.Is(err, ErrFenced) != (reason == ReasonFenced) {
				t.Error(err)
			}
			if got := wait(t, fake, token).GetStopped(); got.GetReason() != wireReason(reason) {
				t.Error(got)
			}
		})
	}
}

func TestWhoIsToldToStopAndSucceedsHasSucceeded(t *testing.T) {
	started := make(chan struct{})
	fake, _ := subscribed(t, func(ctx context.Context, run *Run) error {
		close(started)
		<-ctx.Done()
		run.SetResult("done anyway")
		return nil
	})
	token := assign(t, fake, "")
	<-started
	fake.Cancel(token, ReasonRequested)
	if got := wait(t, fake, token).GetSuccess().GetResult(); got != "done anyway" {
		t.Error(got)
	}
}

func TestTheLossOfTheLeaseIsToldToAHandlerThatWasToldToStop(t *testing.T) {
	told, seen := make(chan struct{}), make(chan error, 1)
	fake, _ := subscribed(t, func(ctx context.Context, run *Run) error {
		<-ctx.Done()
		close(told)
		<-run.Lost()
		seen <- run.Check()
		return context.Cause(ctx)
	})
	token := assign(t, fake, "")
	fake.Cancel(token, ReasonTimeout)
	<-told
	fake.Cancel(token, ReasonFenced)
	if err := <-seen; !errors.Is(err, ErrLeaseLost) || !strings.HasPrefix(err.Error(), "timeout") {
		t.Error(err)
	}
}

func TestConfirmAsksTheSidecar(t *testing.T) {
	answers := make(chan error, 1)
	release := make(chan struct{})
	fake, _ := subscribed(t, func(ctx context.Context, run *Run) error {
		if string(run.Payload) == "wait" {
			<-release
		}
		answers <- run.Confirm(ctx)
		return nil
	})
	assign(t, fake, "")
	if err := <-answers; err != nil {
		t.Error(err)
	}
	token := assign(t, fake, "wait")
	fake.Lose(token)
	close(release)
	if err := <-answers; !errors.Is(err, ErrFenced) {
		t.Error(err)
	}
	fake.GoAway()
	ctx, run, _ := TestRun{Confirm: func(context.Context) error { return notConfirmed("away") }}.Start(context.Background())
	if err := run.Confirm(ctx); !errors.Is(err, ErrNotConfirmed) {
		t.Error(err)
	}
}

func TestABrokenStreamIsNotNoticedByARun(t *testing.T) {
	started, release := make(chan struct{}), make(chan struct{})
	fake, _ := subscribed(t, func(ctx context.Context, run *Run) error {
		close(started)
		select {
		case <-release:
			return run.Check()
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	token := assign(t, fake, "")
	<-started
	fake.BreakStream()
	requests, err := fake.Subscribes(patient(t), 2)
	if err != nil {
		t.Fatal(err)
	}
	if again := requests[1]; again.SessionId != requests[0].SessionId || len(again.InFlight) != 1 || again.InFlight[0] != token {
		t.Error(again)
	}
	close(release)
	if got := wait(t, fake, token); got.GetSuccess() == nil {
		t.Error(got)
	}
}

func TestAResultWaitsForASidecarThatIsAway(t *testing.T) {
	release := make(chan struct{})
	fake, _ := subscribed(t, func(context.Context, *Run) error {
		<-release
		return nil
	})
	token := assign(t, fake, "")
	fake.GoAway()
	close(release)
	fake.ComeBack()
	if got := wait(t, fake, token); got.GetSuccess() == nil {
		t.Error(got)
	}
}

func TestStopHandsARunOverThatDoesNotEndInItsGrace(t *testing.T) {
	started := make(chan struct{})
	fake, subscription := subscribed(t, func(ctx context.Context, _ *Run) error {
		close(started)
		<-ctx.Done()
		return ctx.Err()
	})
	token := assign(t, fake, "")
	<-started
	subscription.Stop(time.Millisecond)
	if err := subscription.Wait(); err != nil {
		t.Error(err)
	}
	if got := wait(t, fake, token).GetStopped(); got.GetReason() != isShutdown {
		t.Error(got)
	}
	if fake.Closed().GetSessionId() != subscription.SessionID {
		t.Error(fake.Closed())
	}
}

func TestRunEndsWithItsContextAndWithASignal(t *testing.T) {
	for name, stop := range map[string]func(context.CancelFunc){
		"its context": func(end context.CancelFunc) { end() },
		"a signal":    func(context.CancelFunc) { _ = syscall.Kill(os.Getpid(), syscall.SIGTERM) },
	} {
		t.Run(name, func(t *testing.T) {
			fake := NewFakeSidecar()
			client, err := New(WithFakeSidecar(fake), WithLogger(quiet))
			if err != nil {
				t.Fatal(err)
			}
			ctx, end := context.WithCancel(context.Background())
			defer end()
			ended := make(chan error, 1)
			go func() { ended <- client.Run(ctx, Every("job", time.Hour, nothing)) }()
			if _, err := fake.KeepAlives(patient(t), 1); err != nil {
				t.Fatal(err)
			}
			stop(end)
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if fake.Closed() == nil {
				t.Error("the session was not closed")
			}
		})
	}
}

func TestReadyOfAClientThatIsStoppedBeforeIsAnError(t *testing.T) {
	fake := NewFakeSidecar()
	fake.GoAway()
	client, err := New(WithFakeSidecar(fake), WithLogger(quiet))
	if err != nil {
		t.Fatal(err)
	}
	subscription, err := client.Subscribe(Every("job", time.Hour, nothing))
	if err != nil {
		t.Fatal(err)
	}
	gone, end := context.WithCancel(context.Background())
	end()
	if _, err := subscription.Ready(gone); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "127.0.0.1:7420") {
		t.Error(err)
	}
	if err := subscription.Close(); err != nil {
		t.Error(err)
	}
	if _, err := subscription.Ready(patient(t)); !errors.Is(err, ErrStopped) {
		t.Error(err)
	}
}

func TestSettingsThatAreWrongAreRefused(t *testing.T) {
	for _, each := range []struct {
		option Option
		want   string
	}{
		{WithMaxConcurrency(0), "max concurrency 0: must be 1 to 10000"},
		{WithMaxConcurrency(10_001), "must be 1 to 10000"},
		{WithStopGrace(-1), "stop grace -1ns: must be whole milliseconds, and not negative"},
		{WithTokenFile("/nowhere"), `token file "/nowhere"`},
	} {
		if _, err := New(each.option); !errors.Is(err, ErrClient) || !strings.Contains(err.Error(), each.want) {
			t.Errorf("%v; want %q", err, each.want)
		}
	}
}

func TestASubscribeRequestThatNoSidecarWouldTakeIsRefusedBeforeItIsSent(t *testing.T) {
	client, err := New(WithFakeSidecar(NewFakeSidecar()))
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{}
	for n := range 16 {
		labels[fmt.Sprintf("%0128d", n)] = strings.Repeat("v", 128)
	}
	jobs := make([]Job, 1_100)
	for n := range jobs {
		jobs[n] = Every(fmt.Sprintf("job-%d", n), time.Hour, nothing, Labels(labels))
	}
	if _, err := client.Subscribe(jobs...); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "split the jobs between clients") {
		t.Error(err)
	}
}

func TestARunForTestsIsWhatAHandlerIsGiven(t *testing.T) {
	ctx, run, cancel := TestRun{Job: "sync", Payload: []byte("p"), Timeout: time.Hour, Trigger: TriggerManual}.Start(context.Background())
	if run.Job != "sync" || run.Attempt != 1 || run.Trigger != TriggerManual || run.ScheduledAt().Year() != 2026 {
		t.Error(run)
	}
	if left, isLimited := run.Remaining(); !isLimited || left <= 0 || left > time.Hour {
		t.Error(left)
	}
	if deadline, has := run.Deadline(); !has || deadline.IsZero() {
		t.Error(deadline)
	}
	if err := run.Sleep(ctx, time.Millisecond); err != nil {
		t.Error(err)
	}
	cancel(ReasonRequested)
	if err := run.Sleep(ctx, time.Hour); !errors.Is(err, ErrCancelled) || errors.Is(err, ErrLeaseLost) {
		t.Error(err)
	}
	if err := context.Cause(ctx); !errors.Is(err, ErrCancelled) {
		t.Error(err)
	}
	if _, without, _ := (TestRun{}).Start(ctx); without.endsAt != never {
		t.Error("a deadline that nobody gave")
	}
}

// handClock is moved by hand.
type handClock struct{ at millis }

func (h *handClock) now() millis { return h.at }

func TestTheExitTimerEndsTheProcessAtItsTimeByTheClockThatCountsSleep(t *testing.T) {
	ended := make(chan int, 1)
	hand := &handClock{at: 100}
	timer := &exitTimer{clock: hand, exit: func(code int) { ended <- code }, at: never}
	timer.set(200)
	timer.set(never)
	timer.look()
	timer.set(hand.at + 60_000)
	timer.look()
	if len(ended) != 0 {
		t.Fatal("too early")
	}
	hand.at += 60_000 // the machine slept
	timer.look()
	if code := <-ended; code != 1 {
		t.Error(code)
	}
	timer.set(never)
}

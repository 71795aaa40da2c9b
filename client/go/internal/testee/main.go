// Go's testee: see tests/conformance/README.md. It decides nothing; it shows what the client does.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"

	anarchon "github.com/anarchon/anarchon/client/go"
)

type facts map[string]any

type config struct {
	Jobs           []string `json:"jobs"`
	MaxConcurrency int      `json:"max_concurrency"`
	StopGrace      string   `json:"stop_grace"`
	OnLeaseLost    string   `json:"on_lease_lost"`
	CAFile         string   `json:"ca_file"`
	Padding        int      `json:"padding"`
}

var (
	writing  sync.Mutex
	released = make(chan struct{})
	release  = sync.OnceFunc(func() { close(released) })
)

func emit(what string, facts facts) {
	writing.Lock()
	defer writing.Unlock()
	facts["what"] = what
	line, err := json.Marshal(facts)
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(append(line, '\n'))
}

func told(run *anarchon.Run, err error) error {
	var cancelled *anarchon.Cancelled
	if errors.As(err, &cancelled) {
		emit("cancelled", facts{
			"token": run.Token, "reason": strings.ToUpper(string(cancelled.Reason)),
			"lost": errors.Is(err, anarchon.ErrLeaseLost),
		})
	}
	return err
}

// ── What the handlers do between `started` and `ended` ──────────────────────────────────────────

func succeed(_ context.Context, run *anarchon.Run) error {
	run.SetResult(string(run.Payload))
	return nil
}

func givesJSON(_ context.Context, run *anarchon.Run) error {
	run.SetResult(map[string]any{"rows": 3, "name": "Ωmega"})
	return nil
}

func retries(_ context.Context, run *anarchon.Run) error {
	var after time.Duration
	if len(run.Payload) > 0 {
		var err error
		if after, err = anarchon.ParseDuration(string(run.Payload)); err != nil {
			return err
		}
	}
	return anarchon.Retry(errors.New("again"), after)
}

func shows(ctx context.Context, run *anarchon.Run) error {
	remaining, isLimited := run.Remaining()
	shown := facts{
		"token": run.Token, "job": run.Job, "slot": run.Slot, "attempt": run.Attempt,
		"fence": strconv.FormatInt(run.Fence, 10), "instance_id": run.InstanceID, "trigger": run.Trigger,
		"payload": string(run.Payload), "scheduled_at": run.ScheduledAt().Format("2006-01-02T15:04:05.000Z"),
		"has_deadline": false, "remaining_ms": nil, "cancelled": ctx.Err() != nil,
	}
	if deadline, has := run.Deadline(); has && isLimited {
		shown["has_deadline"], shown["remaining_ms"] = deadline.After(time.Now()), remaining.Milliseconds()
	}
	emit("context", shown)
	return nil
}

func confirms(ctx context.Context, run *anarchon.Run) error {
	answer := "confirmed"
	if err := run.Confirm(ctx); errors.Is(err, anarchon.ErrLeaseLost) {
		answer = "lost"
	} else if err != nil {
		answer = "unknown"
	}
	emit("confirm", facts{"token": run.Token, "answer": answer})
	return nil
}

func waits(ctx context.Context, run *anarchon.Run) error {
	<-ctx.Done()
	_ = told(run, run.Check())
	return ctx.Err()
}

func waitsAnyway(ctx context.Context, run *anarchon.Run) error {
	_ = waits(ctx, run)
	run.SetResult("done anyway")
	return nil
}

func polls(_ context.Context, run *anarchon.Run) error {
	for run.Check() == nil {
		time.Sleep(10 * time.Millisecond)
	}
	return told(run, run.Check())
}

func lingers(_ context.Context, run *anarchon.Run) error {
	last := ""
	for {
		err := run.Check()
		if now := fmt.Sprint(err, errors.Is(err, anarchon.ErrLeaseLost)); err != nil && now != last {
			last = now
			_ = told(run, err)
		}
		select {
		case <-released:
			if err == nil {
				run.SetResult("released")
			}
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func isStubborn(_ context.Context, run *anarchon.Run) error {
	<-released
	run.SetResult("late")
	return nil
}

var policies = []anarchon.Policy{
	anarchon.Offset(10 * time.Minute),
	anarchon.Jitter(5 * time.Second),
	anarchon.Timeout(2 * time.Minute),
	anarchon.Heartbeat(4 * time.Second),
	anarchon.Lease(20 * time.Second),
	anarchon.Overlap(anarchon.OverlapQueue),
	anarchon.CatchUp(anarchon.CatchUpAll),
	anarchon.CatchUpWindow(6 * time.Hour),
	anarchon.CatchUpLimit(7),
	anarchon.StartDeadline(30 * time.Second),
	anarchon.MaxAttempts(4),
	anarchon.Retries(5),
	anarchon.RetryDelay(2 * time.Second),
	anarchon.RetryFactor(1.5),
	anarchon.RetryMaxDelay(10 * time.Minute),
	anarchon.Concurrency(2),
	anarchon.Labels(map[string]string{"team": "blue"}),
	anarchon.CancelGrace(3 * time.Second),
	anarchon.StopGrace(15 * time.Second),
}

func job(name string) anarchon.Job {
	every := func(does anarchon.Handler, policies ...anarchon.Policy) anarchon.Job {
		return anarchon.Every(name, time.Hour, shown(does), policies...)
	}
	switch name {
	case "succeed":
		return every(succeed)
	case "json":
		return every(givesJSON)
	case "fail":
		return every(func(_ context.Context, run *anarchon.Run) error { return errors.New(string(run.Payload)) })
	case "retry":
		return every(retries)
	case "permanent":
		return every(func(_ context.Context, run *anarchon.Run) error {
			return anarchon.Permanent(errors.New(string(run.Payload)))
		})
	case "context":
		return every(shows)
	case "confirm":
		return every(confirms)
	case "wait":
		return every(waits)
	case "anyway":
		return every(waitsAnyway)
	case "poll":
		return every(polls)
	case "linger":
		return every(lingers)
	case "stubborn":
		return every(isStubborn)
	case "policies":
		return every(succeed, policies...)
	case "cron":
		return anarchon.Cron(name, "0 8 * * *", shown(succeed), anarchon.TimeZone("Europe/Athens"))
	case "brief":
		return every(waits, anarchon.Timeout(time.Second), anarchon.Retries(0))
	case "named":
		return anarchon.ByName(name, shown(succeed))
	}
	fail("ANARCHON_TESTEE: no such job: " + name)
	return anarchon.Job{}
}

func shown(does anarchon.Handler) anarchon.Handler {
	return func(ctx context.Context, run *anarchon.Run) error {
		emit("started", facts{"token": run.Token, "job": run.Job, "slot": run.Slot, "attempt": run.Attempt})
		defer emit("ended", facts{"token": run.Token})
		return does(ctx, run)
	}
}

func padding(number int) anarchon.Job {
	labels := map[string]string{}
	for n := 1; n <= 16; n++ {
		labels[fmt.Sprintf("%02d%s", n, strings.Repeat("k", 126))] = strings.Repeat("v", 128)
	}
	return anarchon.Every(fmt.Sprintf("padding-%d", number), time.Hour, succeed, anarchon.Labels(labels))
}

// ── The client, and what it is told ─────────────────────────────────────────────────────────────

func fail(message string) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(2)
}

func read() config {
	var read config
	decoder := json.NewDecoder(bytes.NewReader([]byte(os.Getenv("ANARCHON_TESTEE"))))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&read); err != nil {
		fail("ANARCHON_TESTEE: " + err.Error())
	}
	return read
}

func subscribe(config config) (*anarchon.Subscription, error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	options := []anarchon.Option{anarchon.WithLogger(log)}
	if config.MaxConcurrency != 0 {
		options = append(options, anarchon.WithMaxConcurrency(config.MaxConcurrency))
	}
	if config.StopGrace != "" {
		grace, err := anarchon.ParseDuration(config.StopGrace)
		if err != nil {
			fail("stop_grace: " + err.Error())
		}
		options = append(options, anarchon.WithStopGrace(grace))
	}
	if config.OnLeaseLost == "exit" {
		options = append(options, anarchon.WithExitOnLeaseLost())
	}
	if config.CAFile != "" {
		pem, err := os.ReadFile(config.CAFile)
		authorities := x509.NewCertPool()
		if err != nil || !authorities.AppendCertsFromPEM(pem) {
			fail("ca_file: cannot be read")
		}
		options = append(options, anarchon.WithCredentials(credentials.NewClientTLSFromCert(authorities, "")))
	}
	var jobs []anarchon.Job
	for _, name := range config.Jobs {
		jobs = append(jobs, job(name))
	}
	for number := 1; number <= config.Padding; number++ {
		jobs = append(jobs, padding(number))
	}
	client, err := anarchon.New(options...)
	if err != nil {
		return nil, err
	}
	return client.Subscribe(jobs...)
}

func listen(subscription *anarchon.Subscription, grace time.Duration) {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		word, rest, _ := strings.Cut(strings.TrimSpace(lines.Text()), " ")
		switch word {
		case "release":
			release()
		case "stop":
			if own, err := anarchon.ParseDuration(rest); err == nil {
				subscription.Stop(own)
			} else {
				subscription.Stop(grace)
			}
		}
	}
	os.Exit(3) // the suite is gone
}

func kindOf(err error) string {
	for _, each := range []struct {
		kind string
		is   []error
	}{ // the first that fits
		{"unsupported", []error{anarchon.ErrUnsupported}}, {"version", []error{anarchon.ErrVersion}},
		{"credentials", []error{anarchon.ErrCredentials}}, {"refused", []error{anarchon.ErrRefused}},
		{"replaced", []error{anarchon.ErrSessionReplaced}}, {"setup", []error{anarchon.ErrJob, anarchon.ErrClient}},
	} {
		for _, is := range each.is {
			if errors.Is(err, is) {
				return each.kind
			}
		}
	}
	return "other"
}

func main() {
	config := read()
	subscription, err := subscribe(config)
	if err == nil {
		grace := 20 * time.Second // the client's default
		if config.StopGrace != "" {
			grace, _ = anarchon.ParseDuration(config.StopGrace) // looked at before
		}
		signals := make(chan os.Signal, 2)
		signal.Notify(signals, syscall.SIGTERM)
		go func() {
			<-signals
			subscription.Stop(grace)
			<-signals
			subscription.Stop(0)
		}()
		go listen(subscription, grace)
		if instance, notReady := subscription.Ready(context.Background()); notReady == nil {
			emit("ready", facts{"instance": instance})
		}
		err = subscription.Wait()
	}
	if err != nil {
		emit("closed", facts{"error": kindOf(err), "message": err.Error()})
		os.Exit(1)
	}
	emit("closed", facts{"error": "", "message": ""})
}

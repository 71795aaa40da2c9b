package anarchon

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

func nothing(context.Context, *Run) error { return nil }

func TestAJobThatIsWrongSaysTheFieldTheValueAndWhatIsRight(t *testing.T) {
	labels := map[string]string{}
	for n := range 17 {
		labels[strings.Repeat("k", n+1)] = ""
	}
	for _, each := range []struct {
		job  Job
		want string
	}{
		{Every("bad name", time.Second, nothing), `job name "bad name": must be 1 to 128 characters`},
		{Every("", time.Second, nothing), `job name "": must be 1 to 128 characters`},
		{Every(strings.Repeat("a", 129), time.Second, nothing), "must be 1 to 128 characters"},
		{Every("job", time.Second, nil), "handler is nil: must be func(ctx, run) error"},
		{Every("job", 99*time.Millisecond, nothing), "period 99ms: must be 100ms to 52w2d"},
		{Every("job", 367*24*time.Hour, nothing), "must be 100ms to 52w2d"},
		{Every("job", time.Second+time.Microsecond, nothing), "must be whole milliseconds"},
		{Every("job", time.Second, nothing, Offset(time.Second)), "Offset 1s: must be whole milliseconds, less than the period 1s"},
		{Every("job", time.Second, nothing, Jitter(time.Second)), "Jitter 1s: must be less than the period, 1s"},
		{Every("job", time.Second, nothing, Lease(2*time.Second)), "Lease 2s: must be 3s to 1h"},
		{Every("job", time.Second, nothing, Lease(9*time.Second), Heartbeat(4*time.Second)), "Heartbeat 4s: must be at most a third of the lease, 9s"},
		{Every("job", time.Second, nothing, Timeout(0)), "Timeout 0s: must be 1ms to 52w2d"},
		{Every("job", time.Second, nothing, StartDeadline(time.Millisecond)), "StartDeadline 1ms: must be 1s to 52w2d"},
		{Every("job", time.Second, nothing, Retries(101)), "Retries 101: must be 0 to 100"},
		{Every("job", time.Second, nothing, RetryDelay(time.Second)), "RetryDelay without Retries: set Retries to 1 or more"},
		{Every("job", time.Second, nothing, Retries(1), RetryDelay(2*time.Hour)), "RetryDelay 2h0m0s: must be at most RetryMaxDelay, 1h"},
		{Every("job", time.Second, nothing, Retries(1), RetryFactor(math.NaN())), "RetryFactor NaN: must be 1 to 100"},
		{Every("job", time.Second, nothing, MaxAttempts(0)), "MaxAttempts 0: must be 1 to 1000"},
		{Every("job", time.Second, nothing, Concurrency(10_001)), "Concurrency 10001: must be 1 to 10000"},
		{Every("job", time.Second, nothing, CatchUpLimit(0)), "CatchUpLimit 0: must be 1 to 10000"},
		{Every("job", time.Second, nothing, Overlap(9)), "Overlap 9: must be one of the constants"},
		{Every("job", time.Second, nothing, CatchUp(0)), "CatchUp 0: must be CatchUpNone, CatchUpLatest or CatchUpAll"},
		{Every("job", time.Second, nothing, CatchUp(CatchUpAll), Overlap(OverlapCancel)), "CatchUpAll with OverlapCancel"},
		{Every("job", time.Second, nothing, Labels(labels)), "17 labels: must be at most 16"},
		{Every("job", time.Second, nothing, Labels(map[string]string{"k": strings.Repeat("v", 129)})), "at most 128 bytes each"},
		{Every("job", time.Second, nothing, TimeZone("UTC")), `TimeZone "UTC": is for Cron`},
		{Cron("job", "0 8 * * *", nothing, Offset(time.Second)), "Offset 1s: is for Every"},
		{Cron("job", "0 8 * * *", nothing, TimeZone("Nowhere!")), "must be an IANA name"},
		{Cron("job", "@every 10s", nothing), "use Every("},
		{Cron("job", "0 8 * *", nothing), "must have five fields, or six with seconds first; it has 4"},
		{Cron("job", "0 25 * * *", nothing), "hour is '25': 25 is outside 0 to 23"},
		{Cron("job", "0 1-25/2 * * *", nothing), "hour is '1-25/2': 25 is outside 0 to 23"},
		{Cron("job", "", nothing), "it has 0"},
	} {
		if err := each.job.Err(); !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), each.want) {
			t.Errorf("%v; want %q", err, each.want)
		}
	}
}

func TestWhatIsNotSaidIsNotSent(t *testing.T) {
	job := Every("job", time.Second, nothing, Retries(0))
	if got := job.spec.String(); job.Err() != nil || job.spec.Retry != nil || job.spec.Jitter != nil ||
		job.spec.GetEvery().Offset != nil || job.spec.CatchUp != nil {
		t.Error(got, job.Err())
	}
	triggered := OnTrigger("triggered", nothing, Timeout(time.Minute))
	if triggered.Err() != nil || triggered.spec.ByName || triggered.spec.Schedule != nil || triggered.spec.Timeout == nil {
		t.Errorf("OnTrigger: %v, %v", triggered.Err(), triggered.spec)
	}
	named := ByName("named", nothing, Timeout(time.Minute))
	if named.Err() != nil || !named.spec.ByName || named.spec.Schedule != nil || named.spec.Timeout == nil {
		t.Error(named.spec, named.Err())
	}
	if cron := Cron("cron", " @daily ", nothing); cron.spec.GetCron().Expression != "@daily" || cron.Err() != nil {
		t.Error(cron.spec, cron.Err())
	}
}

func TestJobsOfOneNameAndNoJobsAreRefused(t *testing.T) {
	job := Every("job", time.Second, nothing)
	for _, each := range []struct {
		jobs []Job
		want string
	}{
		{nil, "0 jobs given: must be 1 to 10000"},
		{[]Job{job, job}, `two jobs are named "job"`},
		{[]Job{{}}, "an empty Job"},
		{[]Job{Every("a b", time.Second, nothing), Cron("c", "*", nothing)}, "it has 1"},
	} {
		if _, err := collect(each.jobs); !errors.Is(errors.Join(err), ErrJob) || !strings.Contains(err.Error(), each.want) {
			t.Errorf("%v; want %q", err, each.want)
		}
	}
}

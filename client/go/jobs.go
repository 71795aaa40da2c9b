package anarchon

import (
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

// Of a cron expression the number of fields and plain numbers are checked here. What needs the whole
// grammar or a calendar (also zones, and the shortest gap of a cron schedule) is left to the
// sidecar, which checks every spec at registration.

const (
	jobsMax          = 10_000
	periodMin        = 100 * time.Millisecond
	day              = 24 * time.Hour
	longest          = 366 * day
	leaseMin         = 3 * time.Second
	leaseMax         = time.Hour
	heartbeatsALease = 3
	expressionMax    = 1_000
	labelsMax        = 16
	labelMaxBytes    = 128
)

var (
	jobName     = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$`)
	zoneName    = regexp.MustCompile(`^[A-Za-z0-9_+/-]{1,64}$`)
	cronNumbers = regexp.MustCompile(`^([0-9]{1,2})(?:-([0-9]{1,2}))?(?:/[0-9]+)?$`)
)

// Handler runs one attempt of a job. A nil error is success; [Retry] and [Permanent] say more of a
// failure. When the attempt is to stop, ctx is cancelled with a [*Cancelled] as its cause: a handler
// that then returns ctx.Err(), context.Cause(ctx) or an error that wraps one of them has stopped as
// it was told. A panic fails the attempt.
type Handler func(ctx context.Context, run *Run) error

// Job is a handler with its name, schedule and policies. Made by [Every], [Cron], [OnTrigger] and [ByName].
type Job struct {
	name    string
	handler Handler
	spec    *anarchonv1.JobSpec
	err     error
}

// Name returns the job's name.
func (j Job) Name() string { return j.name }

// Err returns what is wrong with the job, an [ErrJob], or nil. [Client.Subscribe] returns it too.
func (j Job) Err() error { return j.err }

// Policy says something of a job besides its name and handler. What is left out, the sidecar
// decides; what the sidecar's store cannot do, the sidecar refuses. All durations are whole
// milliseconds.
type Policy func(*plan) error

// plan is a job in the making.
type plan struct {
	spec       *anarchonv1.JobSpec
	retryDelay time.Duration
	retryMax   time.Duration
	retrySaid  string
}

// Every returns a job that is due on a grid counted from the Unix epoch in UTC: at [Offset] +
// n * period. The period is 100 ms to 366 days.
//
// The name identifies the job in the store, and must be the same on every instance and in every
// deploy: 1 to 128 characters of letters, digits and . _ - : /, starting with a letter or digit.
func Every(name string, period time.Duration, handler Handler, policies ...Policy) Job {
	every := &anarchonv1.EverySchedule{Period: durationpb.New(period)}
	spec := &anarchonv1.JobSpec{Schedule: &anarchonv1.JobSpec_Every{Every: every}}
	return newJob(name, handler, spec, checkDuration("period", period, periodMin, longest), policies)
}

// Cron returns a job that is due whenever the wall clock of its [TimeZone], by default UTC, matches
// the expression: five fields, or six with seconds first, or an alias such as "@daily". For the name
// see [Every].
func Cron(name, expression string, handler Handler, policies ...Policy) Job {
	cron := &anarchonv1.CronSchedule{Expression: strings.TrimSpace(expression), TimeZone: "UTC"}
	spec := &anarchonv1.JobSpec{Schedule: &anarchonv1.JobSpec_Cron{Cron: cron}}
	return newJob(name, handler, spec, checkExpression(expression), policies)
}

// ByName offers a handler by its name alone: the sidecar's configuration must have the job. Where
// policies are given here and there, the configuration wins, and a note says so.
func ByName(name string, handler Handler, policies ...Policy) Job {
	return newJob(name, handler, &anarchonv1.JobSpec{ByName: true}, nil, policies)
}

// OnTrigger returns a job without a schedule: it is never due by itself, and runs when somebody triggers
// it. The sidecar refuses it where the store has no control, and with it the policies that are for
// slots: Jitter, StartDeadline, CatchUp and CatchUpLimit. For the name see [Every].
func OnTrigger(name string, handler Handler, policies ...Policy) Job {
	return newJob(name, handler, &anarchonv1.JobSpec{}, nil, policies)
}

func newJob(name string, handler Handler, spec *anarchonv1.JobSpec, wrong error, policies []Policy) Job {
	spec.Name = name
	job := Job{name: name, handler: handler, spec: spec}
	switch {
	case !jobName.MatchString(name):
		job.err = jobError("job name %q: must be 1 to 128 characters of letters, digits and "+
			". _ - : /, starting with a letter or digit", cut(name, 160))
		return job
	case handler == nil:
		wrong = errors.Join(wrong, jobError("handler is nil: must be func(ctx, run) error"))
	}
	made := &plan{spec: spec, retryDelay: time.Second, retryMax: time.Hour}
	for _, policy := range policies {
		wrong = errors.Join(wrong, policy(made))
	}
	if wrong == nil {
		wrong = made.checkRelations()
	}
	if wrong != nil {
		job.err = jobError("job %q: %v", name, strings.ReplaceAll(wrong.Error(), "\n", "; "))
	}
	return job
}

// ── Policies ────────────────────────────────────────────────────────────────────────────────────

// OverlapPolicy says what a slot does that finds another run of its job unfinished.
type OverlapPolicy int32

const (
	// OverlapSkip records the slot as skipped. The default where the store keeps leases.
	OverlapSkip = OverlapPolicy(anarchonv1.OverlapPolicy_OVERLAP_POLICY_SKIP)
	// OverlapAllow starts it at once. The default elsewhere.
	OverlapAllow = OverlapPolicy(anarchonv1.OverlapPolicy_OVERLAP_POLICY_ALLOW)
	// OverlapQueue starts it when the other has ended; of several that wait the newest stays.
	OverlapQueue = OverlapPolicy(anarchonv1.OverlapPolicy_OVERLAP_POLICY_QUEUE)
	// OverlapCancel is as OverlapQueue, and the other run is asked to stop.
	OverlapCancel = OverlapPolicy(anarchonv1.OverlapPolicy_OVERLAP_POLICY_CANCEL)
)

// CatchUpPolicy says which slots are run that came due while nobody could run them.
type CatchUpPolicy int32

const (
	// CatchUpNone runs none of them. The default where the store keeps no leases.
	CatchUpNone = CatchUpPolicy(anarchonv1.CatchUpPolicy_CATCH_UP_POLICY_NONE)
	// CatchUpLatest runs the newest of them. The default where the store keeps leases.
	CatchUpLatest = CatchUpPolicy(anarchonv1.CatchUpPolicy_CATCH_UP_POLICY_LATEST)
	// CatchUpAll runs every one, oldest first.
	CatchUpAll = CatchUpPolicy(anarchonv1.CatchUpPolicy_CATCH_UP_POLICY_ALL)
)

// Offset moves a grid: less than its period. Default: none.
func Offset(offset time.Duration) Policy {
	return func(p *plan) error {
		every := p.spec.GetEvery()
		if every == nil {
			return jobError("Offset %v: is for Every", offset)
		}
		period := every.GetPeriod().AsDuration()
		if offset < 0 || offset >= period || offset%time.Millisecond != 0 {
			return jobError("Offset %v: must be whole milliseconds, less than the period %s", offset, textOf(period))
		}
		every.Offset = durationpb.New(offset)
		return nil
	}
}

// TimeZone names the zone of a cron schedule: an IANA name such as "Europe/Athens". Default: "UTC".
func TimeZone(name string) Policy {
	return func(p *plan) error {
		cron := p.spec.GetCron()
		if cron == nil {
			return jobError("TimeZone %q: is for Cron", name)
		}
		if !zoneName.MatchString(name) {
			return jobError(`TimeZone %q: must be an IANA name such as "Europe/Athens" or "UTC"`, cut(name, 80))
		}
		cron.TimeZone = name
		return nil
	}
}

// Jitter is the longest random wait before an instance claims a slot; less than the gap between
// slots. Default: the smaller of 2 s and a quarter of the gap. Zero: none.
func Jitter(d time.Duration) Policy {
	return duration("Jitter", d, 0, longest, func(s *anarchonv1.JobSpec, w *durationpb.Duration) { s.Jitter = w })
}

// Timeout is how long one attempt may take before it is cancelled. Default: no limit.
func Timeout(d time.Duration) Policy {
	return duration("Timeout", d, time.Millisecond, longest,
		func(s *anarchonv1.JobSpec, w *durationpb.Duration) { s.Timeout = w })
}

// Heartbeat is how often a runner says that it is alive, at most a third of the lease. Default: a sixth.
func Heartbeat(d time.Duration) Policy {
	return duration("Heartbeat", d, time.Millisecond, leaseMax/heartbeatsALease,
		func(s *anarchonv1.JobSpec, w *durationpb.Duration) { s.Heartbeat = w })
}

// Lease is how long a runner is believed after its last heartbeat, 3 s to 1 h. Default: 30 s.
func Lease(d time.Duration) Policy {
	return duration("Lease", d, leaseMin, leaseMax, func(s *anarchonv1.JobSpec, w *durationpb.Duration) { s.Lease = w })
}

// CancelGrace is how long a handler that was asked to stop keeps its lease. Default: 5 s.
func CancelGrace(d time.Duration) Policy {
	return duration("CancelGrace", d, 0, leaseMax,
		func(s *anarchonv1.JobSpec, w *durationpb.Duration) { s.CancelGrace = w })
}

// StopGrace is how long a running handler may go on when its instance stops. Default, and at most:
// the instance's own grace, 20 s.
func StopGrace(d time.Duration) Policy {
	return duration("StopGrace", d, 0, longest,
		func(s *anarchonv1.JobSpec, w *durationpb.Duration) { s.StopGrace = w })
}

// CatchUpWindow: no slot older than this is caught up, nor a run taken over. Default: 24 h.
func CatchUpWindow(d time.Duration) Policy {
	return duration("CatchUpWindow", d, time.Millisecond, longest,
		func(s *anarchonv1.JobSpec, w *durationpb.Duration) { catchUpOf(s).Window = w })
}

// StartDeadline: a slot that nobody claimed for this long is missed. Default: the gap to the next
// slot, at most 60 s, at least jitter + 5 s.
func StartDeadline(d time.Duration) Policy {
	return duration("StartDeadline", d, time.Second, longest,
		func(s *anarchonv1.JobSpec, w *durationpb.Duration) { catchUpOf(s).StartDeadline = w })
}

// Overlap says what a slot does that finds another run unfinished.
func Overlap(policy OverlapPolicy) Policy {
	return func(p *plan) error {
		if policy < OverlapSkip || policy > OverlapCancel {
			return jobError("Overlap %d: must be one of the constants OverlapSkip to OverlapCancel", policy)
		}
		p.spec.Overlap = anarchonv1.OverlapPolicy(policy)
		return nil
	}
}

// CatchUp says which slots are run that came due while nobody could run them.
func CatchUp(policy CatchUpPolicy) Policy {
	return func(p *plan) error {
		if policy < CatchUpNone || policy > CatchUpAll {
			return jobError("CatchUp %d: must be CatchUpNone, CatchUpLatest or CatchUpAll", policy)
		}
		catchUpOf(p.spec).Policy = anarchonv1.CatchUpPolicy(policy)
		return nil
	}
}

// CatchUpLimit: no more slots than this are caught up. 1 to 10,000. Default: 100.
func CatchUpLimit(n int) Policy {
	return number("CatchUpLimit", n, 1, 10_000, func(s *anarchonv1.JobSpec, n int32) { catchUpOf(s).Limit = n })
}

// MaxAttempts is how many attempts a run may have because its runners died, froze or were cut off,
// 1 to 1,000. Default: 3.
func MaxAttempts(n int) Policy {
	return number("MaxAttempts", n, 1, 1_000, func(s *anarchonv1.JobSpec, n int32) { s.MaxAttempts = n })
}

// Concurrency is how many runs of the job one instance may execute at once, 1 to 10,000. Default:
// no limit of its own.
func Concurrency(n int) Policy {
	return number("Concurrency", n, 1, 10_000, func(s *anarchonv1.JobSpec, n int32) { s.Concurrency = n })
}

// Retries is how many attempts follow failed ones, 0 to 100. Default: 0, a failure is final.
func Retries(n int) Policy {
	return number("Retries", n, 0, 100, func(s *anarchonv1.JobSpec, n int32) { retryOf(s).Retries = n })
}

// RetryDelay is the pause before the first retry. Each is drawn from 50 % to 100 % of it. Default: 1 s.
func RetryDelay(d time.Duration) Policy {
	return func(p *plan) error {
		p.retryDelay, p.retrySaid = d, "RetryDelay"
		retryOf(p.spec).Delay = durationpb.New(d)
		return checkDuration("RetryDelay", d, time.Millisecond, longest)
	}
}

// RetryFactor: each pause is this many times the one before, 1 to 100. Default: 2.
func RetryFactor(factor float64) Policy {
	return func(p *plan) error {
		if !(factor >= 1 && factor <= 100) {
			return jobError("RetryFactor %v: must be 1 to 100", factor)
		}
		p.retrySaid = "RetryFactor"
		retryOf(p.spec).Factor = factor
		return nil
	}
}

// RetryMaxDelay: no pause is longer than this. Default: 1 h.
func RetryMaxDelay(d time.Duration) Policy {
	return func(p *plan) error {
		p.retryMax, p.retrySaid = d, "RetryMaxDelay"
		retryOf(p.spec).MaxDelay = durationpb.New(d)
		return checkDuration("RetryMaxDelay", d, time.Millisecond, longest)
	}
}

// Labels are annotations for people and dashboards: at most 16, key and value at most 128 bytes each.
func Labels(labels map[string]string) Policy {
	return func(p *plan) error {
		if len(labels) > labelsMax {
			return jobError("%d labels: must be at most %d", len(labels), labelsMax)
		}
		p.spec.Labels = make(map[string]string, len(labels))
		for key, value := range labels {
			if len(key) > labelMaxBytes || len(value) > labelMaxBytes {
				return jobError("label %q: key and value must be at most %d bytes each", cut(key, 80), labelMaxBytes)
			}
			p.spec.Labels[key] = value
		}
		return nil
	}
}

func duration(
	field string, value, least, most time.Duration, set func(*anarchonv1.JobSpec, *durationpb.Duration),
) Policy {
	return func(p *plan) error {
		set(p.spec, durationpb.New(value))
		return checkDuration(field, value, least, most)
	}
}

func number(field string, value, least, most int, set func(*anarchonv1.JobSpec, int32)) Policy {
	return func(p *plan) error {
		if value < least || value > most {
			return jobError("%s %d: must be %d to %d", field, value, least, most)
		}
		set(p.spec, int32(value))
		return nil
	}
}

func catchUpOf(spec *anarchonv1.JobSpec) *anarchonv1.CatchUp {
	if spec.CatchUp == nil {
		spec.CatchUp = &anarchonv1.CatchUp{}
	}
	return spec.CatchUp
}

func retryOf(spec *anarchonv1.JobSpec) *anarchonv1.RetryPolicy {
	if spec.Retry == nil {
		spec.Retry = &anarchonv1.RetryPolicy{}
	}
	return spec.Retry
}

func (p *plan) checkRelations() error {
	spec := p.spec
	if every := spec.GetEvery(); every != nil && spec.Jitter != nil {
		if jitter, period := spec.Jitter.AsDuration(), every.GetPeriod().AsDuration(); jitter >= period {
			return jobError("Jitter %v: must be less than the period, %s", jitter, textOf(period))
		}
	}
	if spec.Lease != nil && spec.Heartbeat != nil {
		if lease, heartbeat := spec.Lease.AsDuration(), spec.Heartbeat.AsDuration(); heartbeat*heartbeatsALease > lease {
			return jobError("Heartbeat %v: must be at most a third of the lease, %s", heartbeat, textOf(lease))
		}
	}
	if spec.Overlap == anarchonv1.OverlapPolicy_OVERLAP_POLICY_CANCEL &&
		spec.GetCatchUp().GetPolicy() == anarchonv1.CatchUpPolicy_CATCH_UP_POLICY_ALL {
		return jobError("CatchUpAll with OverlapCancel: each slot caught up would cancel the one before; " +
			"use CatchUpLatest, or OverlapQueue")
	}
	return p.checkRetry()
}

func (p *plan) checkRetry() error {
	if p.spec.GetRetry().GetRetries() == 0 {
		if p.retrySaid != "" {
			return jobError("%s without Retries: set Retries to 1 or more", p.retrySaid)
		}
		p.spec.Retry = nil
		return nil
	}
	if p.retryDelay > p.retryMax {
		return jobError("RetryDelay %v: must be at most RetryMaxDelay, %s", p.retryDelay, textOf(p.retryMax))
	}
	return nil
}

// ── Cron expressions ────────────────────────────────────────────────────────────────────────────

// cronFields: name, least, most, and how the sidecar writes the range.
var cronFields = []struct {
	name       string
	low, high  int
	wantedText string
}{
	{"second", 0, 59, "0 to 59"},
	{"minute", 0, 59, "0 to 59"},
	{"hour", 0, 23, "0 to 23"},
	{"day of month", 1, 31, "1 to 31"},
	{"month", 1, 12, "1 to 12 or JAN to DEC"},
	{"day of week", 0, 7, "0 to 7 or SUN to SAT"},
}

func checkExpression(expression string) error {
	shown := cut(expression, 80)
	if len(expression) > expressionMax {
		return jobError("cron expression %q: must be at most %d characters", shown, expressionMax)
	}
	texts := strings.Fields(expression)
	if len(texts) > 0 && strings.HasPrefix(texts[0], "@every") {
		return jobError("cron expression %q: use Every(name, 10*time.Second, ...)", shown)
	}
	if len(texts) == 1 && strings.HasPrefix(texts[0], "@") {
		return nil
	}
	if len(texts) != len(cronFields) && len(texts) != len(cronFields)-1 {
		return jobError("cron expression %q: must have five fields, or six with seconds first; it has %d",
			shown, len(texts))
	}
	for i, field := range cronFields[len(cronFields)-len(texts):] {
		for _, number := range plainNumbers(texts[i]) {
			if number < field.low || number > field.high {
				return jobError("cron expression %q: %s is '%s': %d is outside %s",
					shown, field.name, cut(texts[i], 80), number, field.wantedText)
			}
		}
	}
	return nil
}

// plainNumbers returns the values of a cron field that are mere numbers, also those that bound a range.
func plainNumbers(text string) []int {
	var numbers []int
	for _, item := range strings.Split(text, ",") {
		match := cronNumbers.FindStringSubmatch(item)
		for _, digits := range match[min(1, len(match)):] {
			if number, err := strconv.Atoi(digits); err == nil {
				numbers = append(numbers, number)
			}
		}
	}
	return numbers
}

// collect returns the jobs by name. The error is an ErrJob that names every job that is wrong.
func collect(jobs []Job) (map[string]Job, error) {
	if len(jobs) < 1 || len(jobs) > jobsMax {
		return nil, jobError("%d jobs given: must be 1 to %d", len(jobs), jobsMax)
	}
	var wrong []error
	byName := make(map[string]Job, len(jobs))
	for _, job := range jobs {
		switch {
		case job.spec == nil:
			wrong = append(wrong, jobError("an empty Job: make it with Every, Cron, OnTrigger or ByName"))
			continue
		case job.err != nil:
			wrong = append(wrong, job.err)
		}
		if _, twice := byName[job.name]; twice {
			wrong = append(wrong, jobError("two jobs are named %q: give one of them another name", job.name))
		}
		byName[job.name] = job
	}
	return byName, errors.Join(wrong...)
}

// specsOf returns the specs in the jobs' order.
func specsOf(jobs []Job) []*anarchonv1.JobSpec {
	specs := make([]*anarchonv1.JobSpec, len(jobs))
	for i, job := range jobs {
		specs[i] = job.spec
	}
	return specs
}

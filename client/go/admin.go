package anarchon

import (
	"context"
	"iter"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

const (
	adminTimeout  = 10 * time.Second
	adminPageSize = 500
	payloadMax    = 64 << 10
)

// Admin asks a running sidecar about jobs, runs and instances of its whole namespace. Answers are
// the protocol's own messages. Each call has 10 s, or less where its context has, does not wait for a
// sidecar that is not there, and is not repeated. Safe in any goroutine.
//
// Errors are an [ErrUnavailable] where no sidecar answers, an [ErrNotFound] for what there is not, an
// [ErrUnsupported] for what its backend cannot do, and an [ErrRefused] for a bad argument.
type Admin struct {
	endpoint *endpoint
	channel  *grpc.ClientConn
	stub     anarchonv1.AdminServiceClient
}

// NewAdmin returns an Admin. Of the options those of the address count: [WithAddress],
// [WithTokenFile], [WithCredentials], [WithLogger]. The error is an [ErrClient].
func NewAdmin(options ...Option) (*Admin, error) {
	settings := settings{log: slog.Default()}
	for _, option := range options {
		option(&settings)
	}
	endpoint, err := newEndpoint(settings, settings.log)
	if err != nil {
		return nil, err
	}
	channel, err := endpoint.connect()
	if err != nil {
		return nil, clientError("address %q: %v", endpoint.address, err)
	}
	return &Admin{endpoint, channel, anarchonv1.NewAdminServiceClient(channel)}, nil
}

// Close lets go of the connection.
func (a *Admin) Close() error { return a.channel.Close() }

// Jobs yields all jobs, by name; pages are fetched as they are needed. After an error there is no more.
func (a *Admin) Jobs(ctx context.Context) iter.Seq2[*anarchonv1.Job, error] {
	return pages(func(token string) ([]*anarchonv1.Job, string, error) {
		request := &anarchonv1.ListJobsRequest{PageSize: adminPageSize, PageToken: token}
		page, err := ask(ctx, a.endpoint, a.stub.ListJobs, request)
		return page.GetJobs(), page.GetNextPageToken(), err
	})
}

// Job returns one job.
func (a *Admin) Job(ctx context.Context, job string) (*anarchonv1.Job, error) {
	response, err := ask(ctx, a.endpoint, a.stub.GetJob, &anarchonv1.GetJobRequest{Job: job})
	return response.GetJob(), err
}

// PauseJob stops running the job's slots everywhere; it returns the job as it is now. Once this has
// returned no slot of the job is claimed. What runs goes on, and so do triggered runs.
func (a *Admin) PauseJob(ctx context.Context, job, reason string) (*anarchonv1.Job, error) {
	request := &anarchonv1.PauseJobRequest{Job: job, Reason: reason}
	response, err := ask(ctx, a.endpoint, a.stub.PauseJob, request)
	return response.GetJob(), err
}

// ResumeJob runs the job's slots again, from now on; it returns the job as it is now. Slots that fell
// due meanwhile are recorded as skipped, in one row.
func (a *Admin) ResumeJob(ctx context.Context, job string) (*anarchonv1.Job, error) {
	response, err := ask(ctx, a.endpoint, a.stub.ResumeJob, &anarchonv1.ResumeJobRequest{Job: job})
	return response.GetJob(), err
}

// TriggerRun makes a run of the job that is due now, outside the schedule; it returns it. The payload,
// at most 64 KiB, is handed to the handler. The same request ID gives the same run, so that a call
// that failed may be repeated with its own; "" draws one.
func (a *Admin) TriggerRun(ctx context.Context, job string, payload []byte, requestID string) (*anarchonv1.Run, error) {
	if len(payload) > payloadMax {
		return nil, clientError("payload has %d bytes: must be at most %d", len(payload), payloadMax)
	}
	request := &anarchonv1.TriggerRunRequest{
		Job: job, Payload: payload, RequestId: firstOf(requestID, newUUID()),
	}
	response, err := ask(ctx, a.endpoint, a.stub.TriggerRun, request)
	return response.GetRun(), err
}

// CancelRun asks a run to stop; it returns it as it is now. One that no instance runs ends at once.
func (a *Admin) CancelRun(ctx context.Context, job string, slot int64, reason string) (*anarchonv1.Run, error) {
	request := &anarchonv1.CancelRunRequest{Job: job, Slot: slot, Reason: reason}
	response, err := ask(ctx, a.endpoint, a.stub.CancelRun, request)
	return response.GetRun(), err
}

// PreviewSlots returns the next slots, 1 to 1,000, of a registered job after a moment (zero: now), in
// milliseconds since 1970-01-01T00:00:00Z.
func (a *Admin) PreviewSlots(ctx context.Context, job string, after time.Time, count int) ([]int64, error) {
	request := &anarchonv1.PreviewSlotsRequest{Of: &anarchonv1.PreviewSlotsRequest_Job{Job: job}}
	return a.preview(ctx, request, after, count)
}

// PreviewSlotsOf is as [Admin.PreviewSlots], of a job that need not be registered.
func (a *Admin) PreviewSlotsOf(ctx context.Context, job Job, after time.Time, count int) ([]int64, error) {
	if job.err != nil {
		return nil, job.err
	}
	request := &anarchonv1.PreviewSlotsRequest{Of: &anarchonv1.PreviewSlotsRequest_Spec{Spec: job.spec}}
	return a.preview(ctx, request, after, count)
}

func (a *Admin) preview(
	ctx context.Context, request *anarchonv1.PreviewSlotsRequest, after time.Time, count int,
) ([]int64, error) {
	request.Count = int32(count)
	if !after.IsZero() {
		request.AfterTime = timestamppb.New(after)
	}
	response, err := ask(ctx, a.endpoint, a.stub.PreviewSlots, request)
	return response.GetSlots(), err
}

// RunQuery says which runs to list. Zero values mean "all".
type RunQuery struct {
	Job    string
	States []anarchonv1.RunState
	// InstanceID: only runs with an attempt by this instance.
	InstanceID string
	// FromSlot, inclusive, and UntilSlot, exclusive, are milliseconds since 1970-01-01T00:00:00Z.
	FromSlot, UntilSlot int64
}

// Runs yields runs, newest slot first; pages are fetched as they are needed. After an error there is
// no more.
func (a *Admin) Runs(ctx context.Context, query RunQuery) iter.Seq2[*anarchonv1.Run, error] {
	return pages(func(token string) ([]*anarchonv1.Run, string, error) {
		request := &anarchonv1.ListRunsRequest{
			PageSize: adminPageSize, PageToken: token, Job: query.Job, States: query.States,
			InstanceId: query.InstanceID, FromSlot: query.FromSlot, UntilSlot: query.UntilSlot,
		}
		page, err := ask(ctx, a.endpoint, a.stub.ListRuns, request)
		return page.GetRuns(), page.GetNextPageToken(), err
	})
}

// Run returns one run, with the stack traces of its attempts.
func (a *Admin) Run(ctx context.Context, job string, slot int64) (*anarchonv1.Run, error) {
	response, err := ask(ctx, a.endpoint, a.stub.GetRun, &anarchonv1.GetRunRequest{Job: job, Slot: slot})
	return response.GetRun(), err
}

// Instances yields the instances seen lately; pages are fetched as they are needed. After an error
// there is no more.
func (a *Admin) Instances(ctx context.Context) iter.Seq2[*anarchonv1.Instance, error] {
	return pages(func(token string) ([]*anarchonv1.Instance, string, error) {
		request := &anarchonv1.ListInstancesRequest{PageSize: adminPageSize, PageToken: token}
		page, err := ask(ctx, a.endpoint, a.stub.ListInstances, request)
		return page.GetInstances(), page.GetNextPageToken(), err
	})
}

// Instance returns one instance; "" is the one that answers.
func (a *Admin) Instance(ctx context.Context, instanceID string) (*anarchonv1.Instance, error) {
	request := &anarchonv1.GetInstanceRequest{InstanceId: instanceID}
	response, err := ask(ctx, a.endpoint, a.stub.GetInstance, request)
	return response.GetInstance(), err
}

// ask makes one call.
func ask[Request, Response any](
	ctx context.Context, endpoint *endpoint,
	method func(context.Context, *Request, ...grpc.CallOption) (*Response, error), request *Request,
) (*Response, error) {
	ctx, end := context.WithTimeout(ctx, adminTimeout)
	defer end()
	response, err := unary(ctx, endpoint, method, request, false)
	if err != nil {
		return nil, err
	}
	return response, nil
}

// pages yields the items of all pages.
func pages[Item any](fetch func(token string) ([]*Item, string, error)) iter.Seq2[*Item, error] {
	return func(yield func(*Item, error) bool) {
		for token := ""; ; {
			items, next, err := fetch(token)
			if err != nil {
				yield(nil, err)
				return
			}
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if token = next; token == "" {
				return
			}
		}
	}
}

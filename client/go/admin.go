package anarchon

import (
	"context"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

const (
	adminTimeout  = 10 * time.Second
	adminPageSize = 500

	payloadMaxBytes   = 64 << 10
	reasonMaxBytes    = 1_024
	requestIDMaxBytes = 128
)

// Admin asks a running sidecar about jobs, runs and instances of its whole namespace. Answers are
// the protocol's own messages. Each call has 10 s, or less where its context has, does not wait for a
// sidecar that is not there, and is not repeated. Safe in any goroutine.
//
// Errors are an [ErrUnavailable] where no sidecar answers, an [ErrNotFound] for what there is not, an
// [ErrUnsupported] for what its backend cannot do, an [ErrRefused] for a bad argument, and an
// [ErrClient] for one that cannot even be sent.
type Admin struct {
	endpoint *endpoint
	channel  *grpc.ClientConn
	stub     anarchonv1.AdminServiceClient
	timeout  time.Duration
	scope    atomic.Value
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
	return &Admin{
		endpoint: endpoint, channel: channel, stub: anarchonv1.NewAdminServiceClient(channel), timeout: adminTimeout,
	}, nil
}

// Close lets go of the connection.
func (a *Admin) Close() error { return a.channel.Close() }

// Scope returns what the last answer of a call covers: "" for the whole namespace, "instance=ID" for
// what that instance knows of itself, as its store keeps no history. Watches do not change it.
func (a *Admin) Scope() string {
	scope, _ := a.scope.Load().(string)
	return scope
}

// Jobs yields all jobs, by name; pages are fetched as they are needed. After an error there is no more.
func (a *Admin) Jobs(ctx context.Context) iter.Seq2[*anarchonv1.Job, error] {
	return pages(func(token string) ([]*anarchonv1.Job, string, error) {
		request := &anarchonv1.ListJobsRequest{PageSize: adminPageSize, PageToken: token}
		page, err := ask(ctx, a, a.stub.ListJobs, request)
		return page.GetJobs(), page.GetNextPageToken(), err
	})
}

// Job returns one job.
func (a *Admin) Job(ctx context.Context, job string) (*anarchonv1.Job, error) {
	response, err := ask(ctx, a, a.stub.GetJob, &anarchonv1.GetJobRequest{Job: job})
	return response.GetJob(), err
}

// PauseJob stops running the job's slots everywhere; it returns the job as it is now. Once this has
// returned no slot of the job is claimed. What runs goes on, and so do triggered runs.
func (a *Admin) PauseJob(ctx context.Context, job, reason string) (*anarchonv1.Job, error) {
	if err := checkSize("reason", len(reason), reasonMaxBytes); err != nil {
		return nil, err
	}
	request := &anarchonv1.PauseJobRequest{Job: job, Reason: reason}
	response, err := ask(ctx, a, a.stub.PauseJob, request)
	return response.GetJob(), err
}

// ResumeJob runs the job's slots again, from now on; it returns the job as it is now. Slots that fell
// due meanwhile are recorded as skipped, in one row.
func (a *Admin) ResumeJob(ctx context.Context, job string) (*anarchonv1.Job, error) {
	response, err := ask(ctx, a, a.stub.ResumeJob, &anarchonv1.ResumeJobRequest{Job: job})
	return response.GetJob(), err
}

// TriggerRun makes a run of the job that is due now, outside the schedule; it returns it. The payload,
// at most 64 KiB, is handed to the handler. The same request ID gives the same run, with the payload of
// the first call, so that a call that failed may be repeated with its own; "" draws one. The run is
// skipped where the job's overlap policy is to skip and another run is unfinished.
func (a *Admin) TriggerRun(ctx context.Context, job string, payload []byte, requestID string) (*anarchonv1.Run, error) {
	if err := errors.Join(
		checkSize("payload", len(payload), payloadMaxBytes),
		checkSize("requestID", len(requestID), requestIDMaxBytes),
	); err != nil {
		return nil, err
	}
	request := &anarchonv1.TriggerRunRequest{
		Job: job, Payload: payload, RequestId: firstOf(requestID, newUUID()),
	}
	response, err := ask(ctx, a, a.stub.TriggerRun, request)
	return response.GetRun(), err
}

// CancelRun asks a run to stop; it returns it as it is now. One that no instance runs ends at once. The
// reason is handed to the handler and kept with the run ([anarchonv1.Run.CancelMessage]). A run that has
// ended is an [ErrRefused].
func (a *Admin) CancelRun(ctx context.Context, job string, slot int64, reason string) (*anarchonv1.Run, error) {
	if err := checkSize("reason", len(reason), reasonMaxBytes); err != nil {
		return nil, err
	}
	request := &anarchonv1.CancelRunRequest{Job: job, Slot: slot, Reason: reason}
	response, err := ask(ctx, a, a.stub.CancelRun, request)
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
	if int(int32(count)) != count {
		return nil, clientError("count %d: must be 1 to 1,000", count)
	}
	request.Count = int32(count)
	if !after.IsZero() {
		request.AfterTime = timestamppb.New(after)
	}
	response, err := ask(ctx, a, a.stub.PreviewSlots, request)
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
		page, err := ask(ctx, a, a.stub.ListRuns, request)
		return page.GetRuns(), page.GetNextPageToken(), err
	})
}

// WatchQuery says which runs to watch. Zero values mean "all".
type WatchQuery struct {
	Job string
	// FromSlot, inclusive, and UntilSlot, exclusive, are milliseconds since 1970-01-01T00:00:00Z.
	FromSlot, UntilSlot int64
}

// WatchRuns begins to watch runs. On return the watch has begun: list what there is after that, and
// nothing falls between. What it returns yields, once, each run that is unfinished then, and each as it
// is after a change. Changes that follow one another closely may be merged, and a state may come
// twice, but the latest state of each run always comes; a renewed lease is no change. Runs come without
// the stack traces of their attempts.
//
// The watch goes on until the loop over it is left, or ctx is done, which the loop gets as ctx.Err():
// give it a context that you cancel. An [ErrUnavailable] ends it when the sidecar stops, with the reason
// DRAINING, and when the store has been away for a minute, with STORE_UNAVAILABLE. It is not begun again
// by itself: watch again, and list what has ended meanwhile.
func (a *Admin) WatchRuns(ctx context.Context, query WatchQuery) (iter.Seq2[*anarchonv1.Run, error], error) {
	watching, end := context.WithCancel(ctx)
	late := time.AfterFunc(a.timeout, end)
	stream, err := a.beginWatch(watching, &anarchonv1.WatchRunsRequest{
		Job: query.Job, FromSlot: query.FromSlot, UntilSlot: query.UntilSlot,
	})
	inTime := late.Stop()
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case !inTime:
		err = unavailable("the sidecar at %s did not begin to watch within %v", a.endpoint.address, a.timeout)
	}
	if err != nil {
		end()
		return nil, err
	}
	return func(yield func(*anarchonv1.Run, error) bool) {
		defer end()
		for {
			change, err := stream.Recv()
			switch {
			case errors.Is(err, io.EOF):
				return
			case err != nil && ctx.Err() != nil:
				yield(nil, ctx.Err())
				return
			case err != nil:
				yield(nil, a.endpoint.error(err, stream.Trailer()))
				return
			case !yield(change.GetRun(), nil):
				return
			}
		}
	}, nil
}

// beginWatch opens the stream, and waits until the sidecar says by its metadata that it watches.
func (a *Admin) beginWatch(
	ctx context.Context, request *anarchonv1.WatchRunsRequest,
) (grpc.ServerStreamingClient[anarchonv1.WatchRunsResponse], error) {
	if err := checkSendable(request); err != nil {
		return nil, err
	}
	ctx, refused := a.endpoint.call(ctx)
	if refused != nil {
		return nil, refused
	}
	stream, err := a.stub.WatchRuns(ctx, request)
	if err != nil {
		return nil, a.endpoint.error(err, nil)
	}
	header, err := stream.Header()
	if header == nil && err == nil { // the call has ended, and receiving says how
		_, err = stream.Recv()
	}
	if err != nil {
		return nil, a.endpoint.error(err, stream.Trailer())
	}
	return stream, nil
}

// Run returns one run, with the stack traces of its attempts.
func (a *Admin) Run(ctx context.Context, job string, slot int64) (*anarchonv1.Run, error) {
	response, err := ask(ctx, a, a.stub.GetRun, &anarchonv1.GetRunRequest{Job: job, Slot: slot})
	return response.GetRun(), err
}

// Instances yields the instances seen lately; pages are fetched as they are needed. After an error
// there is no more.
func (a *Admin) Instances(ctx context.Context) iter.Seq2[*anarchonv1.Instance, error] {
	return pages(func(token string) ([]*anarchonv1.Instance, string, error) {
		request := &anarchonv1.ListInstancesRequest{PageSize: adminPageSize, PageToken: token}
		page, err := ask(ctx, a, a.stub.ListInstances, request)
		return page.GetInstances(), page.GetNextPageToken(), err
	})
}

// Instance returns one instance; "" is the one that answers.
func (a *Admin) Instance(ctx context.Context, instanceID string) (*anarchonv1.Instance, error) {
	request := &anarchonv1.GetInstanceRequest{InstanceId: instanceID}
	response, err := ask(ctx, a, a.stub.GetInstance, request)
	return response.GetInstance(), err
}

// ask makes one call.
func ask[Request, Response any](
	ctx context.Context, admin *Admin,
	method func(context.Context, *Request, ...grpc.CallOption) (*Response, error), request *Request,
) (*Response, error) {
	if message, is := any(request).(proto.Message); is {
		if err := checkSendable(message); err != nil {
			return nil, err
		}
	}
	ctx, end := context.WithTimeout(ctx, admin.timeout)
	defer end()
	var trailer metadata.MD
	heard := func(ctx context.Context, request *Request, options ...grpc.CallOption) (*Response, error) {
		return method(ctx, request, append(options, grpc.Trailer(&trailer))...)
	}
	response, err := unary(ctx, admin.endpoint, heard, request, false)
	if err != nil {
		return nil, err
	}
	scope, unreadable := url.PathUnescape(strings.Join(trailer.Get("anarchon-scope"), ""))
	if unreadable != nil {
		return nil, unavailable("the sidecar says what its answer covers, and it cannot be read: %v", unreadable)
	}
	admin.scope.Store(scope)
	return response, nil
}

// checkSendable returns an ErrClient for what gRPC would not send: a text that is no UTF-8, a message
// that is too long.
func checkSendable(request proto.Message) error {
	bytes, err := proto.Marshal(request)
	if err != nil {
		return clientError("an argument cannot be sent: %v", err)
	}
	return checkSize("request", len(bytes), messageMaxBytes)
}

func checkSize(argument string, bytes, most int) error {
	if bytes > most {
		return clientError("%s of %d bytes: must be at most %d bytes", argument, bytes, most)
	}
	return nil
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

package anarchon

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

// Admin calls, to a server that answers as the tests want.

type adminPuppet struct {
	anarchonv1.UnimplementedAdminServiceServer
	gone chan struct{} // a watch's call has ended here, too

	mutex sync.Mutex
	asked []proto.Message
}

func (p *adminPuppet) ask(request proto.Message) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.asked = append(p.asked, request)
}

func (p *adminPuppet) requests() []proto.Message {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return slices.Clone(p.asked)
}

func (p *adminPuppet) ListRuns(
	_ context.Context, request *anarchonv1.ListRunsRequest,
) (*anarchonv1.ListRunsResponse, error) {
	p.ask(request)
	if request.PageToken == "" {
		first := []*anarchonv1.Run{{Slot: 4}, {Slot: 3}}
		return &anarchonv1.ListRunsResponse{Runs: first, NextPageToken: "more"}, nil
	}
	return &anarchonv1.ListRunsResponse{Runs: []*anarchonv1.Run{{Slot: 2}}}, nil
}

func (p *adminPuppet) GetJob(ctx context.Context, request *anarchonv1.GetJobRequest) (*anarchonv1.GetJobResponse, error) {
	_ = grpc.SetTrailer(ctx, metadata.Pairs("anarchon-reason", "JOB_NOT_FOUND"))
	return nil, status.Error(codes.NotFound, "no job "+request.Job)
}

func (p *adminPuppet) GetInstance(
	ctx context.Context, request *anarchonv1.GetInstanceRequest,
) (*anarchonv1.GetInstanceResponse, error) {
	if request.InstanceId == "" {
		_ = grpc.SetTrailer(ctx, metadata.Pairs("anarchon-scope", "instance=an%20swering:1"))
	}
	return &anarchonv1.GetInstanceResponse{Instance: &anarchonv1.Instance{InstanceId: request.InstanceId}}, nil
}

func (p *adminPuppet) TriggerRun(
	_ context.Context, request *anarchonv1.TriggerRunRequest,
) (*anarchonv1.TriggerRunResponse, error) {
	p.ask(request)
	return &anarchonv1.TriggerRunResponse{Run: &anarchonv1.Run{RequestId: request.RequestId}}, nil
}

func (p *adminPuppet) CancelRun(
	_ context.Context, request *anarchonv1.CancelRunRequest,
) (*anarchonv1.CancelRunResponse, error) {
	p.ask(request)
	run := &anarchonv1.Run{Slot: request.Slot, CancelRequested: true, CancelMessage: request.Reason}
	return &anarchonv1.CancelRunResponse{Run: run}, nil
}

func (p *adminPuppet) PreviewSlots(
	_ context.Context, request *anarchonv1.PreviewSlotsRequest,
) (*anarchonv1.PreviewSlotsResponse, error) {
	p.ask(request)
	return &anarchonv1.PreviewSlotsResponse{Slots: []int64{7, 8}}, nil
}

func (p *adminPuppet) WatchRuns(
	request *anarchonv1.WatchRunsRequest, stream grpc.ServerStreamingServer[anarchonv1.WatchRunsResponse],
) error {
	p.ask(request)
	defer func() { p.gone <- struct{}{} }()
	switch request.Job {
	case "nowhere":
		stream.SetTrailer(metadata.Pairs("anarchon-reason", "STORE_UNAVAILABLE"))
		return status.Error(codes.Unavailable, "the store does not answer now")
	case "slow":
		<-stream.Context().Done()
		return nil
	}
	if err := stream.SendHeader(nil); err != nil {
		return err
	}
	for _, slot := range []int64{1, 2} {
		if err := stream.Send(&anarchonv1.WatchRunsResponse{Run: &anarchonv1.Run{Slot: slot}}); err != nil {
			return err
		}
	}
	if request.Job == "stopping" {
		stream.SetTrailer(metadata.Pairs("anarchon-reason", "DRAINING"))
		return status.Error(codes.Unavailable, "the sidecar is going away")
	}
	<-stream.Context().Done()
	return nil
}

func asking(t *testing.T) (*Admin, *adminPuppet) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	puppet := &adminPuppet{gone: make(chan struct{}, 8)}
	server := grpc.NewServer()
	anarchonv1.RegisterAdminServiceServer(server, puppet)
	go func() { _ = server.Serve(listener) }() // until it is stopped
	t.Cleanup(server.Stop)
	return adminAt(t, listener.Addr().String()), puppet
}

func adminAt(t *testing.T, address string) *Admin {
	t.Helper()
	admin, err := NewAdmin(WithAddress(address), WithLogger(quiet))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = admin.Close() }) // it only says that it was closed before
	return admin
}

func TestListsGoThroughAllPagesAsTheyAreNeeded(t *testing.T) {
	admin, puppet := asking(t)
	query := RunQuery{Job: "sync", States: []anarchonv1.RunState{anarchonv1.RunState_RUN_STATE_FAILED}, FromSlot: 2, UntilSlot: 5}
	var slots []int64
	for run, err := range admin.Runs(patient(t), query) {
		if err != nil {
			t.Fatal(err)
		}
		slots = append(slots, run.Slot)
		if pages := len(puppet.requests()); pages != map[bool]int{true: 1, false: 2}[len(slots) <= 2] {
			t.Error("pages fetched:", pages)
		}
	}
	if !slices.Equal(slots, []int64{4, 3, 2}) {
		t.Error(slots)
	}
	want := &anarchonv1.ListRunsRequest{
		PageSize: 500, PageToken: "more", Job: "sync", States: query.States, FromSlot: 2, UntilSlot: 5,
	}
	if got := puppet.requests()[1]; !proto.Equal(got, want) {
		t.Error(got)
	}
}

func TestAnAdminErrorIsTheKindThatItsReasonSays(t *testing.T) {
	admin, _ := asking(t)
	if _, err := admin.Job(patient(t), "sync"); !errors.Is(err, ErrNotFound) || err.Error() != "no job sync" {
		t.Error(err)
	}
	if _, err := admin.ResumeJob(patient(t), "sync"); !errors.Is(err, ErrVersion) { // unimplemented
		t.Error(err)
	}
	absent := adminAt(t, "127.0.0.1:1")
	if _, err := absent.Instance(patient(t), ""); !errors.Is(err, ErrUnavailable) ||
		!strings.Contains(err.Error(), "start one with `anarchon serve`, or give the address of another") {
		t.Error(err)
	}
}

func TestWhatTheLastAnswerCoversIsKept(t *testing.T) {
	admin, _ := asking(t)
	for instance, want := range map[string]string{"": "instance=an swering:1", "other": ""} {
		if _, err := admin.Instance(patient(t), instance); err != nil || admin.Scope() != want {
			t.Errorf("%q: %q, %v", instance, admin.Scope(), err)
		}
	}
}

func TestATriggerDrawsARequestIDWhereNoneIsGiven(t *testing.T) {
	admin, _ := asking(t)
	drawn, err := admin.TriggerRun(patient(t), "sync", []byte("now"), "")
	if err != nil || len(drawn.RequestId) != 36 {
		t.Error(drawn, err)
	}
	if own, err := admin.TriggerRun(patient(t), "sync", nil, "mine"); err != nil || own.RequestId != "mine" {
		t.Error(own, err)
	}
}

func TestACancelledRunKeepsTheReasonGiven(t *testing.T) {
	admin, _ := asking(t)
	run, err := admin.CancelRun(patient(t), "sync", 5, "not today")
	if err != nil || !run.CancelRequested || run.CancelMessage != "not today" {
		t.Error(run, err)
	}
}

func TestSlotsArePreviewedOfAJobByNameOrByCode(t *testing.T) {
	admin, puppet := asking(t)
	if slots, err := admin.PreviewSlots(patient(t), "sync", time.Unix(5, 0), 2); err != nil || !slices.Equal(slots, []int64{7, 8}) {
		t.Error(slots, err)
	}
	if _, err := admin.PreviewSlotsOf(patient(t), Every("other", time.Hour, nothing), time.Time{}, 2); err != nil {
		t.Error(err)
	}
	named, coded := puppet.requests()[0].(*anarchonv1.PreviewSlotsRequest), puppet.requests()[1].(*anarchonv1.PreviewSlotsRequest)
	if named.GetJob() != "sync" || named.AfterTime.GetSeconds() != 5 || named.Count != 2 {
		t.Error(named)
	}
	if coded.GetSpec().GetName() != "other" || coded.AfterTime != nil {
		t.Error(coded)
	}
}

func TestWhatCannotBeSentIsNamedAndNotSent(t *testing.T) {
	admin, puppet := asking(t)
	ctx := patient(t)
	for want, call := range map[string]func() error{
		"payload of 65537 bytes: must be at most 65536 bytes": func() error {
			_, err := admin.TriggerRun(ctx, "sync", make([]byte, 64<<10+1), "")
			return err
		},
		"requestID of 129 bytes: must be at most 128 bytes": func() error {
			_, err := admin.TriggerRun(ctx, "sync", nil, strings.Repeat("x", 129))
			return err
		},
		"reason of 1025 bytes: must be at most 1024 bytes": func() error {
			_, err := admin.CancelRun(ctx, "sync", 1, strings.Repeat("x", 1_025))
			return err
		},
		"reason of 1026 bytes: must be at most 1024 bytes": func() error {
			_, err := admin.PauseJob(ctx, "sync", strings.Repeat("Ω", 513))
			return err
		},
		"must be at most 4194304 bytes": func() error {
			_, err := admin.Job(ctx, strings.Repeat("x", 5<<20))
			return err
		},
		"an argument cannot be sent": func() error {
			_, err := admin.WatchRuns(ctx, WatchQuery{Job: "\xff"})
			return err
		},
		"count 4294967301: must be 1 to 1,000": func() error {
			_, err := admin.PreviewSlots(ctx, "sync", time.Time{}, 1<<32+5)
			return err
		},
	} {
		if err := call(); !errors.Is(err, ErrClient) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	if asked := puppet.requests(); len(asked) != 0 {
		t.Error("sent:", asked)
	}
}

// ── Watching ────────────────────────────────────────────────────────────────────────────────────

func TestWatchedRunsComeAsTheyChangeUntilTheLoopIsLeft(t *testing.T) {
	admin, puppet := asking(t)
	changes, err := admin.WatchRuns(patient(t), WatchQuery{Job: "sync", FromSlot: 1, UntilSlot: 9})
	if err != nil {
		t.Fatal(err)
	}
	want := &anarchonv1.WatchRunsRequest{Job: "sync", FromSlot: 1, UntilSlot: 9}
	if got := puppet.requests()[0]; !proto.Equal(got, want) {
		t.Error(got)
	}
	var slots []int64
	for run, err := range changes {
		if err != nil {
			t.Fatal(err)
		}
		if slots = append(slots, run.Slot); len(slots) == 2 {
			break
		}
	}
	if !slices.Equal(slots, []int64{1, 2}) {
		t.Error(slots)
	}
	heard(t, puppet)
}

// heard waits until the sidecar is told that nobody watches any more.
func heard(t *testing.T, puppet *adminPuppet) {
	t.Helper()
	select {
	case <-puppet.gone:
	case <-patient(t).Done():
		t.Error("the sidecar is not told")
	}
}

func TestAWatchEndsWithItsContext(t *testing.T) {
	admin, puppet := asking(t)
	ctx, end := context.WithCancel(patient(t))
	defer end()
	changes, err := admin.WatchRuns(ctx, WatchQuery{Job: "sync"})
	if err != nil {
		t.Fatal(err)
	}
	var ended error
	for run, err := range changes {
		if ended = err; run.GetSlot() == 2 {
			end()
		}
	}
	if ended != context.Canceled {
		t.Error(ended)
	}
	heard(t, puppet)
	if _, err := admin.WatchRuns(ctx, WatchQuery{}); err != context.Canceled {
		t.Error(err)
	}
}

func TestAWatchThatTheSidecarEndsSaysWhy(t *testing.T) {
	admin, _ := asking(t)
	changes, err := admin.WatchRuns(patient(t), WatchQuery{Job: "stopping"})
	if err != nil {
		t.Fatal(err)
	}
	var slots []int64
	var ended error
	for run, err := range changes {
		if ended = err; err == nil {
			slots = append(slots, run.Slot)
		}
	}
	var said *SidecarError
	if !slices.Equal(slots, []int64{1, 2}) || !errors.As(ended, &said) || said.Reason != "DRAINING" ||
		!errors.Is(ended, ErrUnavailable) || ended.Error() != "the sidecar is going away" {
		t.Error(slots, ended)
	}
}

func TestAWatchThatCannotBeginIsRefusedAtOnce(t *testing.T) {
	admin, puppet := asking(t)
	_, err := admin.WatchRuns(patient(t), WatchQuery{Job: "nowhere"})
	if !errors.Is(err, ErrUnavailable) || err.Error() != "the store does not answer now" {
		t.Error(err)
	}
	heard(t, puppet)
	admin.timeout = 100 * time.Millisecond
	_, err = admin.WatchRuns(patient(t), WatchQuery{Job: "slow"})
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "did not begin to watch within 100ms") {
		t.Error(err)
	}
	heard(t, puppet)
	absent := adminAt(t, "127.0.0.1:1")
	if _, err = absent.WatchRuns(patient(t), WatchQuery{}); !errors.Is(err, ErrUnavailable) ||
		!strings.Contains(err.Error(), "no sidecar answers at 127.0.0.1:1") {
		t.Error(err)
	}
}

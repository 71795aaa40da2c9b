package anarchon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

const (
	// DefaultAddress is where a sidecar is looked for.
	DefaultAddress = "127.0.0.1:7420"

	unixPathMaxBytes = 107 // what a socket address of the system can hold, with its closing zero
	tokenMaxBytes    = 4_096
	othersWrite      = 0o022
)

// transport makes the calls of the protocol's SessionService. Safe to use in any goroutine.
type transport interface {
	// subscribe opens the session's stream, waiting for a sidecar as long as it takes, and gives its
	// events until it ends.
	subscribe(context.Context, *anarchonv1.SubscribeRequest, func(*anarchonv1.SubscribeResponse)) *SidecarError
	// keepAlive does not wait for a sidecar that is not there.
	keepAlive(context.Context, *anarchonv1.KeepAliveRequest) (*anarchonv1.KeepAliveResponse, *SidecarError)
	// complete waits for a sidecar until the context's deadline.
	complete(context.Context, *anarchonv1.CompleteRequest) (*anarchonv1.CompleteResponse, *SidecarError)
	closeSession(context.Context, *anarchonv1.CloseSessionRequest) *SidecarError
	close()
}

// endpoint is where a sidecar is, and what opens its door.
type endpoint struct {
	address     string
	credentials credentials.TransportCredentials // nil: none
	token       *callToken
}

// newEndpoint returns the endpoint of what was given, else of ANARCHON_ADDRESS and
// ANARCHON_TOKEN_FILE. The error is an ErrClient.
func newEndpoint(settings settings, log *slog.Logger) (*endpoint, error) {
	address := firstOf(settings.address, os.Getenv("ANARCHON_ADDRESS"), DefaultAddress)
	local, err := isLocal(address)
	if err != nil {
		return nil, err
	}
	if !local && settings.credentials == nil {
		return nil, clientError("address %q: is not on this machine, so calls to it need TLS: give "+
			"WithCredentials(credentials.NewTLS(...)), or the address of a local sidecar", address)
	}
	e := &endpoint{address: address, credentials: settings.credentials}
	if err := e.checkSocket(); err != nil {
		return nil, err
	}
	e.token, err = newCallToken(firstOf(settings.tokenFile, os.Getenv("ANARCHON_TOKEN_FILE")), log)
	return e, err
}

func firstOf(texts ...string) string {
	for _, text := range texts {
		if text != "" {
			return text
		}
	}
	return ""
}

var hostAndPort = regexp.MustCompile(`^(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})$`)

// isLocal reports whether the address is on this machine. The error, for what is no address, is an
// ErrClient.
func isLocal(address string) (bool, error) {
	if path, isUnix := socketPath(address); isUnix {
		if !strings.HasPrefix(path, "/") {
			return false, clientError("address %q: must be unix:/absolute/path", address)
		}
		if len(path) > unixPathMaxBytes {
			return false, clientError("address %q: a socket's path has at most %d bytes", address, unixPathMaxBytes)
		}
		return true, nil
	}
	match := hostAndPort.FindStringSubmatch(address)
	if match != nil {
		if port, err := strconv.Atoi(match[2]); err == nil && port >= 1 && port <= 65_535 {
			host := strings.Trim(match[1], "[]")
			ip, err := netip.ParseAddr(host)
			return (err == nil && ip.IsLoopback()) || host == "localhost", nil
		}
	}
	return false, clientError(`address %q: must be "host:port" such as "%s", or "unix:/path"`, address, DefaultAddress)
}

func socketPath(address string) (path string, isUnix bool) {
	path, isUnix = strings.CutPrefix(address, "unix:")
	return strings.TrimPrefix(path, "//"), isUnix
}

// checkSocket returns an ErrClient if somebody else than the sidecar's user could have put a socket
// there.
//
// A sidecar makes its socket in a directory that belongs to its user and that nobody else may write,
// so a socket that lies otherwise is not a sidecar's. One that is not there is no error.
func (e *endpoint) checkSocket() error {
	path, isUnix := socketPath(e.address)
	if !isUnix {
		return nil
	}
	socket, err := os.Lstat(path)
	if err != nil {
		return nil // nor is one that cannot be seen: connecting says what is wrong
	}
	directory, err := os.Stat(filepath.Dir(path))
	if err != nil {
		return nil
	}
	socketOwner, directoryOwner := ownerOf(socket), ownerOf(directory)
	if mode := directory.Mode().Perm(); socketOwner != directoryOwner || mode&othersWrite != 0 {
		return clientError("address %q: the socket belongs to user %d and lies in a directory of user %d, "+
			"mode %04o, so it may be somebody else's than the sidecar's: both must belong to one user, and "+
			"nobody else may write in the directory", e.address, socketOwner, directoryOwner, mode)
	}
	return nil
}

func ownerOf(file os.FileInfo) uint32 {
	if system, isSystem := file.Sys().(*syscall.Stat_t); isSystem {
		return system.Uid
	}
	return 0
}

// absence is what to say where no sidecar answers, and what to do about it.
func (e *endpoint) absence() string {
	if local, _ := isLocal(e.address); local {
		return fmt.Sprintf("no sidecar answers at %s; start one with `anarchon serve`, "+
			"or give the address of another", e.address)
	}
	return "no sidecar answers at " + e.address
}

// connect returns a channel; it connects when it is first used.
func (e *endpoint) connect() (*grpc.ClientConn, error) {
	target := "passthrough:///" + e.address
	if path, isUnix := socketPath(e.address); isUnix {
		target = "unix://" + path
	}
	security := e.credentials
	if security == nil {
		security = insecure.NewCredentials()
	}
	return grpc.NewClient(target,
		grpc.WithTransportCredentials(security),
		// A sidecar is never behind the proxy that the environment names.
		grpc.WithNoProxy(),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: backoffFirst.duration(), Multiplier: 2, Jitter: 0.25, MaxDelay: backoffMax.duration(),
			},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallSendMsgSize(messageMaxBytes), grpc.MaxCallRecvMsgSize(messageMaxBytes),
		),
	)
}

// call returns the context of a call, with the call token, if what listens may be told it.
func (e *endpoint) call(ctx context.Context) (context.Context, *SidecarError) {
	if err := e.checkSocket(); err != nil {
		return nil, unavailable("%v", err)
	}
	if token := e.token.current(); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	return ctx, nil
}

// error returns what a failed call means.
func (e *endpoint) error(err error, trailer metadata.MD) *SidecarError {
	said := status.Convert(err)
	reason := strings.Join(trailer.Get("anarchon-reason"), "")
	message := said.Message()
	if reason == "" {
		switch said.Code() {
		case codes.Unimplemented:
			message = fmt.Sprintf("the server at %s does not speak anarchon.v1: %s", e.address, message)
		case codes.Unavailable:
			message = e.unavailable(message)
		case codes.DeadlineExceeded:
			message = fmt.Sprintf("the sidecar at %s did not answer in time", e.address)
		}
	}
	return sidecarError(said.Code(), reason, message)
}

// unavailable says what gRPC says of a connection in words for people where it is only that none was
// made. With credentials there are more ways to fail than one, and only gRPC's words tell them apart.
func (e *endpoint) unavailable(details string) string {
	switch {
	case !strings.Contains(strings.ToLower(details), "error while dialing"): // older gRPC begins it with a capital
		return fmt.Sprintf("the connection to the sidecar at %s is lost: %s", e.address, details)
	case e.credentials == nil:
		return e.absence()
	}
	return e.absence() + ": " + details
}

// ── The call token ──────────────────────────────────────────────────────────────────────────────

// callToken is the token in a file, read again when the file has changed. Safe in any goroutine.
type callToken struct {
	file  string
	log   *slog.Logger
	mutex sync.Mutex
	seen  os.FileInfo
	token string
}

var printable = regexp.MustCompile(`^[!-~]+$`)

// newCallToken reads the file; "" is none. The error is an ErrClient.
func newCallToken(file string, log *slog.Logger) (*callToken, error) {
	c := &callToken{file: file, log: log}
	if file == "" {
		return c, nil
	}
	return c, c.read()
}

// current returns the token. A file that is just being replaced changes nothing: the token before
// goes on being used.
func (c *callToken) current() string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.file == "" {
		return ""
	}
	if err := c.read(); err != nil {
		c.log.Warn("the call token stays as it was: " + err.Error())
	}
	return c.token
}

func (c *callToken) read() error {
	stat, err := os.Stat(c.file)
	if err == nil && c.seen != nil && os.SameFile(stat, c.seen) &&
		stat.ModTime().Equal(c.seen.ModTime()) && stat.Size() == c.seen.Size() {
		return nil
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(c.file)
	}
	if err != nil {
		return clientError("token file %q: %v", c.file, errors.Unwrap(err))
	}
	// The sidecar's own file may hold two while one replaces the other: the first is sent.
	first := ""
	for _, line := range strings.Split(string(text), "\n") {
		if first = strings.TrimSpace(line); first != "" {
			break
		}
	}
	if !printable.MatchString(first) || len(first) > tokenMaxBytes {
		return clientError("token file %q: must begin with one line of printable ASCII without spaces", c.file)
	}
	c.seen, c.token = stat, first
	return nil
}

// ── gRPC ────────────────────────────────────────────────────────────────────────────────────────

// grpcTransport makes the calls over one gRPC channel.
type grpcTransport struct {
	endpoint   *endpoint
	channel    *grpc.ClientConn
	stub       anarchonv1.SessionServiceClient
	log        *slog.Logger
	wasReached bool // used by subscribe alone, of which there is one at a time
}

func newGrpcTransport(endpoint *endpoint, log *slog.Logger) (*grpcTransport, error) {
	channel, err := endpoint.connect()
	if err != nil {
		return nil, clientError("address %q: %v", endpoint.address, err)
	}
	return &grpcTransport{
		endpoint: endpoint, channel: channel, stub: anarchonv1.NewSessionServiceClient(channel), log: log,
	}, nil
}

func (t *grpcTransport) subscribe(
	ctx context.Context, request *anarchonv1.SubscribeRequest, take func(*anarchonv1.SubscribeResponse),
) *SidecarError {
	if err := t.reach(ctx); err != nil {
		return err
	}
	ctx, refused := t.endpoint.call(ctx)
	if refused != nil {
		return refused
	}
	stream, err := t.stub.Subscribe(ctx, request, grpc.WaitForReady(true))
	if err != nil {
		return t.endpoint.error(err, nil)
	}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return unavailable("the sidecar ended the stream")
		}
		if err != nil {
			return t.endpoint.error(err, stream.Trailer())
		}
		take(event)
	}
}

// reach waits for the connection, and says once that one has to wait.
func (t *grpcTransport) reach(ctx context.Context) *SidecarError {
	said := t.wasReached // later losses are the session's to report
	for {
		t.channel.Connect()
		state := t.channel.GetState()
		switch {
		case state == connectivity.Ready:
			t.wasReached = true
			return nil
		case state == connectivity.Shutdown:
			return unavailable("the client has stopped")
		case state == connectivity.TransientFailure && !said:
			said = true
			t.log.Warn(t.endpoint.absence() + "; trying again until one answers")
		}
		if !t.channel.WaitForStateChange(ctx, state) {
			return unavailable("the client has stopped")
		}
	}
}

func (t *grpcTransport) keepAlive(
	ctx context.Context, request *anarchonv1.KeepAliveRequest,
) (*anarchonv1.KeepAliveResponse, *SidecarError) {
	return unary(ctx, t.endpoint, t.stub.KeepAlive, request, false)
}

func (t *grpcTransport) complete(
	ctx context.Context, request *anarchonv1.CompleteRequest,
) (*anarchonv1.CompleteResponse, *SidecarError) {
	return unary(ctx, t.endpoint, t.stub.Complete, request, true)
}

func (t *grpcTransport) closeSession(ctx context.Context, request *anarchonv1.CloseSessionRequest) *SidecarError {
	_, err := unary(ctx, t.endpoint, t.stub.CloseSession, request, false)
	return err
}

func (t *grpcTransport) close() { _ = t.channel.Close() } // it only says that it was closed before

// unary makes one call.
func unary[Request, Response any](
	ctx context.Context, endpoint *endpoint,
	method func(context.Context, *Request, ...grpc.CallOption) (*Response, error),
	request *Request, waits bool,
) (*Response, *SidecarError) {
	ctx, refused := endpoint.call(ctx)
	if refused != nil {
		return nil, refused
	}
	var trailer metadata.MD
	response, err := method(ctx, request, grpc.WaitForReady(waits), grpc.Trailer(&trailer))
	if err != nil {
		return nil, endpoint.error(err, trailer)
	}
	return response, nil
}

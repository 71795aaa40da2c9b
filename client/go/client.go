package anarchon

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	randv2 "math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

const (
	stopGraceDefault      = 20 * time.Second
	maxConcurrencyDefault = 100
	maxConcurrencyMax     = 10_000
	// Timers stop while the machine sleeps, so the clock that counts sleep is looked at this often.
	watchEvery millis = 1_000
)

// Client is an application's side of Anarchon. Nothing is connected before [Client.Subscribe] or
// [Client.Run].
type Client struct {
	settings settings
	endpoint *endpoint
}

type settings struct {
	address        string
	tokenFile      string
	credentials    credentials.TransportCredentials
	maxConcurrency int
	stopGrace      time.Duration
	exits          bool
	watched        bool
	log            *slog.Logger
	// For tests.
	clock     clock
	random    func() float64
	transport transport
}

// Option is a setting of a client.
type Option func(*settings)

// WithAddress is the sidecar's, "host:port" or "unix:/path". Default: the environment's
// ANARCHON_ADDRESS, else [DefaultAddress].
func WithAddress(address string) Option { return func(s *settings) { s.address = address } }

// WithTokenFile names the file that holds the call token, read again when it changes. Default: the
// environment's ANARCHON_TOKEN_FILE.
func WithTokenFile(file string) Option { return func(s *settings) { s.tokenFile = file } }

// WithCredentials is for a sidecar on another machine: credentials.NewTLS(...).
func WithCredentials(credentials credentials.TransportCredentials) Option {
	return func(s *settings) { s.credentials = credentials }
}

// WithMaxConcurrency is the most handlers that run at once, 1 to 10,000. Default: 100.
func WithMaxConcurrency(n int) Option { return func(s *settings) { s.maxConcurrency = n } }

// WithStopGrace is how long handlers may go on when the client stops. Default: 20 s.
func WithStopGrace(grace time.Duration) Option { return func(s *settings) { s.stopGrace = grace } }

// WithExitOnLeaseLost also ends the process, with status 1, where a handler has not stopped when its
// lease ends, be it after the client has stopped. By default the handler is told, and no more.
func WithExitOnLeaseLost() Option { return func(s *settings) { s.exits = true } }

// WithWatched says whether the sidecar, where it can see this process, takes its end for the end of
// its handlers, and hands their runs on at once. Default: true; false where what handlers started may
// outlive the process.
func WithWatched(watched bool) Option { return func(s *settings) { s.watched = watched } }

// WithLogger is where the client logs. Default: [slog.Default].
func WithLogger(log *slog.Logger) Option { return func(s *settings) { s.log = log } }

// New returns a client. The error is an [ErrClient].
func New(options ...Option) (*Client, error) {
	settings := settings{
		maxConcurrency: maxConcurrencyDefault, stopGrace: stopGraceDefault, watched: true,
		clock: bootClock{}, random: randv2.Float64,
	}
	for _, option := range options {
		option(&settings)
	}
	if settings.log == nil {
		settings.log = slog.Default()
	}
	if n := settings.maxConcurrency; n < 1 || n > maxConcurrencyMax {
		return nil, clientError("max concurrency %d: must be 1 to %d", n, maxConcurrencyMax)
	}
	if grace := settings.stopGrace; grace < 0 || grace%time.Millisecond != 0 {
		return nil, clientError("stop grace %v: must be whole milliseconds, and not negative", grace)
	}
	endpoint, err := newEndpoint(settings, settings.log)
	if err != nil {
		return nil, err
	}
	settings.address = endpoint.address
	return &Client{settings, endpoint}, nil
}

// Subscribe starts to run the jobs, and returns at once.
//
// A sidecar that is not there is no error: it is looked for until there is one. The error is an
// [ErrJob] for what is wrong with a job, an [ErrClient] for what is set up wrongly. What the sidecar
// refuses comes from [Subscription.Ready] and [Subscription.Wait].
func (c *Client) Subscribe(jobs ...Job) (*Subscription, error) {
	byName, err := collect(jobs)
	if err != nil {
		return nil, err
	}
	if err := c.endpoint.checkSocket(); err != nil {
		return nil, err
	}
	request := &anarchonv1.SubscribeRequest{
		SessionId:      newUUID(),
		Client:         clientInfo(c.settings.watched),
		Jobs:           specsOf(jobs),
		MaxConcurrency: int32(c.settings.maxConcurrency),
	}
	if size := proto.Size(request); size > messageMaxBytes {
		return nil, tooLarge(size)
	}
	transport := c.settings.transport
	if transport == nil {
		if transport, err = newGrpcTransport(c.endpoint, c.settings.log); err != nil {
			return nil, err
		}
	}
	return newSubscription(request, byName, transport, c.settings), nil
}

// Run runs the jobs until ctx is done, or until SIGINT or SIGTERM, and then stops as
// [Subscription.Stop] does with the client's grace; a second signal skips the grace. What it waits
// for is logged. It returns what Subscribe and [Subscription.Wait] return.
func (c *Client) Run(ctx context.Context, jobs ...Job) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	subscription, err := c.Subscribe(jobs...)
	if err != nil {
		return err
	}
	select {
	case <-subscription.Done():
		return subscription.Wait()
	case <-ctx.Done():
		subscription.Stop(c.settings.stopGrace)
	case <-signals:
		subscription.stop(c.settings.stopGrace, "once more to cancel them")
	}
	select {
	case <-subscription.Done():
	case <-signals:
		subscription.Stop(0)
	}
	return subscription.Wait()
}

// Subscription is jobs that are being run. Made by [Client.Subscribe]; safe in any goroutine.
type Subscription struct {
	// SessionID names the session in the sidecar's list of clients.
	SessionID string

	settings  settings
	session   *session // used by the loop alone
	transport transport
	runner    *runner
	trust     *trust
	exitTimer *exitTimer
	facts     chan any
	calls     context.Context
	endCalls  context.CancelFunc
	endStream context.CancelFunc
	waiting   sync.WaitGroup

	isReady    chan struct{}
	instanceID string
	done       chan struct{}
	err        error

	mutex    sync.Mutex
	tickets  int
	confirms map[int]chan error
}

func newSubscription(
	request *anarchonv1.SubscribeRequest, jobs map[string]Job, transport transport, settings settings,
) *Subscription {
	s := &Subscription{
		SessionID: request.GetSessionId(),
		settings:  settings,
		session:   newSession(request, settings.random),
		transport: transport,
		trust:     &trust{},
		facts:     make(chan any),
		endStream: func() {},
		isReady:   make(chan struct{}),
		done:      make(chan struct{}),
		confirms:  map[int]chan error{},
	}
	s.calls, s.endCalls = context.WithCancel(context.Background())
	if settings.exits {
		s.exitTimer = &exitTimer{clock: settings.clock, exit: os.Exit, at: never}
	}
	s.runner = &runner{
		jobs: jobs, clock: settings.clock, trust: s.trust, log: settings.log,
		onEnd:   func(token string, outcome *anarchonv1.Outcome) { s.post(handlerEnded{token, outcome}) },
		onLate:  s.letLive,
		confirm: s.confirm, attempts: map[string]*attempt{},
	}
	go s.loop()
	return s
}

// Ready waits until the sidecar has accepted the jobs and answers, and returns its instance's name.
// The error is that of ctx, or what [Subscription.Wait] returns, or [ErrStopped].
func (s *Subscription) Ready(ctx context.Context) (instanceID string, err error) {
	select {
	case <-s.isReady:
		return s.instanceID, nil
	case <-ctx.Done():
		return "", fmt.Errorf("no sidecar at %s has accepted the jobs yet: %w",
			s.settings.address, context.Cause(ctx))
	case <-s.done:
	}
	select {
	case <-s.isReady:
		return s.instanceID, nil
	default:
	}
	if s.err != nil {
		return "", s.err
	}
	return "", ErrStopped
}

// Stop begins to stop, and returns at once: no more runs are taken; handlers may go on for the grace,
// and for their job's own where that is shorter, then they are cancelled. Runs that were cancelled
// are handed over to other instances at once. Called again, it can only shorten the grace.
func (s *Subscription) Stop(grace time.Duration) { s.stop(grace, "") }

func (s *Subscription) stop(grace time.Duration, hint string) {
	s.post(stopAsked{millis(max(0, grace) / time.Millisecond), hint})
}

// Done is closed when the subscription is over: after Stop, or with the error that ended it.
func (s *Subscription) Done() <-chan struct{} { return s.done }

// Wait waits until the subscription is over. The error is an [ErrRefused] where the sidecar does not
// accept a job or the client, an [ErrSessionReplaced], or nil after Stop.
func (s *Subscription) Wait() error {
	<-s.done
	return s.err
}

// Close stops with the client's grace, and waits: for defer.
func (s *Subscription) Close() error {
	s.Stop(s.settings.stopGrace)
	return s.Wait()
}

// ── The loop: facts to the session, its commands carried out ────────────────────────────────────

func (s *Subscription) loop() {
	defer s.end()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var fact any = start{}
	for {
		for _, command := range s.session.handle(s.settings.clock.now(), fact) {
			if s.carryOut(command) {
				return
			}
		}
		if s.exitTimer != nil {
			s.exitTimer.set(s.session.exitAt())
		}
		timer.Reset(max(0, min(s.session.wakeAt()-s.settings.clock.now(), watchEvery)).duration())
		select {
		case fact = <-s.facts:
		case <-timer.C:
			fact = tick{}
		}
	}
}

func (s *Subscription) end() {
	// Nobody renews from here on: what still runs is told so.
	s.runner.abandon()
	close(s.done)
	s.letLive()
	s.endCalls()
	s.waiting.Wait()
	if s.settings.transport == nil {
		s.transport.close()
	}
}

// letLive lets go of the exit timer, after the end, once no handler runs any more.
func (s *Subscription) letLive() {
	if s.exitTimer != nil && !s.runner.isRunning() {
		s.exitTimer.set(never)
	}
}

// post hands a fact to the loop. After the end it means nothing.
func (s *Subscription) post(fact any) {
	select {
	case s.facts <- fact:
	case <-s.done:
	}
}

// carryOut does what the session says, without waiting for anything, and returns whether it is over.
func (s *Subscription) carryOut(command any) (isOver bool) {
	switch command := command.(type) {
	case openStream:
		s.endStream()
		ctx, end := context.WithCancel(s.calls)
		s.endStream = end
		s.spawn(func() { s.readStream(ctx, command) })
	case endStream:
		s.endStream()
	case sendKeepAlive:
		s.spawn(func() { s.sendKeepAlive(command) })
	case sendResults:
		s.spawn(func() { s.sendResults(command) })
	case sendClose:
		s.spawn(func() { s.sendClose(command) })
	case startHandler:
		s.runner.start(command.assignment)
	case cancelHandler:
		s.runner.cancel(command.token, command.reason, command.message, command.trusted)
	case setTrust:
		s.trust.set(command.end)
	case answerConfirm:
		s.answer(command.ticket, command.err)
	case ready:
		s.instanceID = command.instanceID
		close(s.isReady)
	case say:
		s.settings.log.Log(context.Background(), logLevels[command.level], command.message)
	case closed:
		s.err = command.err
		return true
	default:
		panic(fmt.Sprintf("anarchon: no such command: %T", command))
	}
	return false
}

var logLevels = map[level]slog.Level{info: slog.LevelInfo, warning: slog.LevelWarn, failure: slog.LevelError}

func (s *Subscription) spawn(call func()) {
	s.waiting.Add(1)
	go func() {
		defer s.waiting.Done()
		call()
	}()
}

func (s *Subscription) readStream(ctx context.Context, command openStream) {
	err := s.transport.subscribe(ctx, command.request, func(event *anarchonv1.SubscribeResponse) {
		s.post(streamEvent{command.stream, event})
	})
	s.post(streamEnded{command.stream, err})
}

func (s *Subscription) sendKeepAlive(command sendKeepAlive) {
	ctx, end := context.WithTimeout(s.calls, command.timeout.duration())
	defer end()
	response, err := s.transport.keepAlive(ctx, command.request)
	if err != nil {
		s.post(keepAliveFailed{command.number, err})
		return
	}
	s.post(keepAliveAnswered{command.number, response})
}

func (s *Subscription) sendResults(command sendResults) {
	ctx, end := context.WithTimeout(s.calls, command.timeout.duration())
	defer end()
	response, err := s.transport.complete(ctx, command.request)
	if err != nil {
		s.post(resultsFailed{command.tokens, err})
		return
	}
	s.post(resultsAnswered{command.tokens, response})
}

func (s *Subscription) sendClose(command sendClose) {
	ctx, end := context.WithTimeout(s.calls, command.timeout.duration())
	defer end()
	if err := s.transport.closeSession(ctx, command.request); err != nil {
		s.settings.log.Warn("the session could not be closed, and ends by time-out: " + err.Error())
	}
	s.post(closeEnded{})
}

// confirm asks for a fresh renewal, in a handler's goroutine.
func (s *Subscription) confirm(ctx context.Context, token string) error {
	answer := make(chan error, 1)
	s.mutex.Lock()
	s.tickets++
	ticket := s.tickets
	s.confirms[ticket] = answer
	s.mutex.Unlock()
	defer func() {
		s.mutex.Lock()
		defer s.mutex.Unlock()
		delete(s.confirms, ticket)
	}()
	s.post(confirmAsked{token, ticket})
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.done:
		return notConfirmed("the client has stopped")
	}
}

func (s *Subscription) answer(ticket int, err error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if answer, waits := s.confirms[ticket]; waits { // else the handler has ended meanwhile
		answer <- err
	}
}

// newUUID draws a UUID of version 4.
func newUUID() string {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic("anarchon: the system has no randomness: " + err.Error())
	}
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

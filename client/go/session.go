package anarchon

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/anarchon/anarchon/client/go/anarchonv1"
)

// The session as a state machine without I/O: the client specification in code.
//
// session.handle(now, fact) takes what has happened and returns what is to be done; session.wakeAt
// says when to call it again with tick{}. Time and chance come in from outside.
//
// A session is detached (no stream), subscribing (one is being opened), attached, or closed. Leaving
// is a direction, not a state: a session that leaves keeps its stream and its trust for as long as a
// handler runs.

const (
	backoffFirst                millis = 100
	backoffMax                  millis = 5_000
	keepAliveIntervalMin        millis = 200 // whatever a sidecar says, no more keep-alives than this
	keepAliveTimeoutMax         millis = 5_000
	completeTimeout             millis = 10_000
	completeFor                 millis = 5 * 60_000  // at least; for the lease where it is longer ...
	completeForMax              millis = 60 * 60_000 // ... but not for longer than a lease can be
	closeTimeout                millis = 5_000
	cancelGraceDefault          millis = 5_000
	rememberedBeyondConcurrency        = 1_024
	resultsMax                         = 1_000
	resultsMaxBytes                    = 2 << 20
	messageMaxBytes                    = 4 << 20
	namesShown                         = 5
	never                       millis = math.MaxInt64

	notAnswered = "no keep-alive was answered in time"
	notKnown    = "the sidecar no longer knows our session"
)

// ── Facts: what has happened ────────────────────────────────────────────────────────────────────

type (
	// start: the client wants the session.
	start struct{}
	// tick: the time of wakeAt has come.
	tick struct{}
	// streamEvent came on a stream.
	streamEvent struct {
		stream int
		event  *anarchonv1.SubscribeResponse
	}
	// streamEnded: a stream ended, or could not be opened.
	streamEnded struct {
		stream int
		err    *SidecarError
	}
	// keepAliveAnswered: a keep-alive was answered.
	keepAliveAnswered struct {
		number   int
		response *anarchonv1.KeepAliveResponse
	}
	// keepAliveFailed: a keep-alive was not answered, or with an error.
	keepAliveFailed struct {
		number int
		err    *SidecarError
	}
	// handlerEnded: a handler has returned.
	handlerEnded struct {
		token   string
		outcome *anarchonv1.Outcome
	}
	// resultsAnswered: results got their receipts, one each, in the order in which they were sent.
	resultsAnswered struct {
		tokens   []string
		response *anarchonv1.CompleteResponse
	}
	// resultsFailed: results got no answer, or an error.
	resultsFailed struct {
		tokens []string
		err    *SidecarError
	}
	// confirmAsked: a handler wants its lease renewed now. The ticket comes back with the answer.
	confirmAsked struct {
		token  string
		ticket int
	}
	// stopAsked: the client wants to leave; handlers may go on for the grace. The hint says to
	// people, where there is something to wait for, how not to.
	stopAsked struct {
		grace millis
		hint  string
	}
	// closeEnded: CloseSession was answered, or was not.
	closeEnded struct{}
)

// ── Commands: what is to be done, in this order ─────────────────────────────────────────────────

type (
	// openStream: call Subscribe, and end the stream before.
	openStream struct {
		stream  int
		request *anarchonv1.SubscribeRequest
	}
	// endStream: end the present stream.
	endStream struct{}
	// sendKeepAlive: call KeepAlive; it counts as sent now.
	sendKeepAlive struct {
		number  int
		request *anarchonv1.KeepAliveRequest
		timeout millis
	}
	// sendResults: call Complete.
	sendResults struct {
		tokens  []string
		request *anarchonv1.CompleteRequest
		timeout millis
	}
	// sendClose: call CloseSession.
	sendClose struct {
		request *anarchonv1.CloseSessionRequest
		timeout millis
	}
	// startHandler: run this attempt's handler.
	startHandler struct{ assignment *anarchonv1.Assignment }
	// cancelHandler: tell a handler to stop. Trusted: it may still finish what it is at.
	cancelHandler struct {
		token   string
		reason  anarchonv1.CancelReason
		message string
		trusted bool
	}
	// setTrust: trust the session until then.
	setTrust struct{ end millis }
	// answerConfirm: answer a handler's question. No error: the lease was just renewed.
	answerConfirm struct {
		ticket int
		err    error
	}
	// ready: the session is attached, and its first keep-alive answered.
	ready struct{ instanceID string }
	// say: tell people.
	say struct {
		level   level
		message string
	}
	// closed: the session is over.
	closed struct{ err error }
)

type level int

const (
	info level = iota
	warning
	failure
)

// ── The machine ─────────────────────────────────────────────────────────────────────────────────

type state int

const (
	detached state = iota
	subscribing
	attached
	isClosed
)

// running is an attempt whose handler runs.
type running struct {
	assignment  *anarchonv1.Assignment
	cancelled   bool
	lostAt      millis // never: not lost
	lostBecause anarchonv1.CancelReason
}

// finished is an attempt whose handler has ended, and whose result has no receipt yet.
type finished struct {
	outcome  *anarchonv1.Outcome
	label    string
	giveUpAt millis
	tellFor  millis
	sendAt   millis
	tries    int
	alone    bool // its batch was refused: it goes alone, so that it spoils no other's
}

// ticketed is a handler's question, of which token.
type ticketed struct {
	ticket int
	token  string
}

// unanswered is a keep-alive that has not been answered yet.
type unanswered struct {
	sentAt         millis
	attachedStream int // 0: none
	tickets        []ticketed
}

// session is one client's attachment to its sidecar.
type session struct {
	request  *anarchonv1.SubscribeRequest // without what is in flight
	random   func() float64               // draws from [0, 1)
	specs    map[string]*anarchonv1.JobSpec
	commands []any

	state       state
	stream      int
	openAt      millis
	failures    int
	toldLost    bool
	wasAttached bool
	isReady     bool
	instanceID  string

	trustEnd    millis
	interval    millis
	keepAliveAt millis
	keepAlives  int
	answered    int
	unanswered  map[int]*unanswered
	confirms    []ticketed

	held       ordered[*anarchonv1.Assignment]
	running    ordered[*running]
	finished   ordered[*finished]
	isSending  bool
	remembered []string // the oldest first
	known      map[string]bool

	err       error
	isLeaving bool
	stopAt    millis
	graceEnd  millis
	leaveBy   millis
	isClosing bool
}

func newSession(request *anarchonv1.SubscribeRequest, random func() float64) *session {
	specs := make(map[string]*anarchonv1.JobSpec, len(request.GetJobs()))
	for _, spec := range request.GetJobs() {
		specs[spec.GetName()] = spec
	}
	return &session{
		request: request, random: random, specs: specs,
		openAt: never, keepAliveAt: never, interval: keepAliveIntervalMin,
		unanswered: map[int]*unanswered{}, known: map[string]bool{},
	}
}

// handle takes in what has happened, and returns what is to be done.
func (s *session) handle(now millis, fact any) []any {
	if s.state == isClosed {
		return nil
	}
	s.noticeStandstill(now)
	// Before anything else: trust that has ended is not revived by what comes late (S4).
	s.endTrustIfOver(now)
	s.takeIn(now, fact)
	s.advance(now)
	commands := s.commands
	s.commands = nil
	return commands
}

// wakeAt returns when to call handle with tick{} if nothing happens before.
func (s *session) wakeAt() millis {
	if s.state == isClosed {
		return never
	}
	at := min(s.openAt, s.keepAliveAt)
	for _, run := range s.running.all() {
		if run.lostAt == never {
			at = min(at, s.trustEnd)
		}
		if s.isLeaving && !s.isClosing && !run.cancelled {
			at = min(at, s.cancelAt(run))
		}
	}
	for _, done := range s.finished.all() {
		at = min(at, done.giveUpAt)
		if !s.isSending {
			at = min(at, done.sendAt)
		}
	}
	if s.isLeaving && !s.isClosing {
		at = min(at, s.leaveBy)
	}
	return at
}

// inFlight returns the tokens of every attempt that runs, or has ended without a receipt yet.
func (s *session) inFlight() []string { return slices.Concat(s.running.keys, s.finished.keys) }

// exitAt returns when a process that is not to outlive a lost lease must be gone: one keep-alive
// interval, which is the margin of the session's shortest lease, after the trust of an attempt that
// still runs. Never, while nothing runs.
func (s *session) exitAt() millis {
	at := never
	for _, run := range s.running.all() {
		end := s.trustEnd
		if run.lostAt != never {
			end = run.lostAt
		}
		at = min(at, end+s.interval)
	}
	return at
}

// ── Facts ───────────────────────────────────────────────────────────────────────────────────────

func (s *session) takeIn(now millis, fact any) {
	switch fact := fact.(type) {
	case start:
		s.openAt = now
	case streamEvent:
		if fact.stream == s.stream {
			s.takeEvent(now, fact.event)
		}
	case streamEnded:
		if fact.stream == s.stream {
			s.streamEnded(now, fact.err)
		}
	case keepAliveAnswered:
		s.keepAliveAnswered(now, fact.number, fact.response)
	case keepAliveFailed:
		s.keepAliveFailed(now, fact.number, fact.err)
	case handlerEnded:
		run, _ := s.running.take(fact.token)
		s.report(now, run.assignment, fact.outcome)
	case resultsAnswered:
		s.receipts(now, fact.tokens, fact.response)
	case resultsFailed:
		s.resultsFailed(now, fact.tokens, fact.err)
	case confirmAsked:
		s.confirms = append(s.confirms, ticketed{fact.ticket, fact.token})
	case stopAsked:
		isNews := !s.isLeaving
		s.leave(now, fact.grace)
		if isNews {
			s.sayWhatIsWaitedFor(now, fact.hint)
		}
	case closeEnded:
		s.close()
	}
}

func (s *session) takeEvent(now millis, event *anarchonv1.SubscribeResponse) {
	switch event := event.GetEvent().(type) {
	case *anarchonv1.SubscribeResponse_Attached:
		s.attached(now, event.Attached)
	case *anarchonv1.SubscribeResponse_Runs:
		if s.state == attached {
			for _, assignment := range event.Runs.GetAssignments() {
				s.assigned(assignment)
			}
		}
	case *anarchonv1.SubscribeResponse_Cancel:
		cancel := event.Cancel
		trusted := !endsTrust(cancel.GetReason())
		s.cancel(now, cancel.GetToken(), cancel.GetReason(), cancel.GetMessage(), trusted)
	case *anarchonv1.SubscribeResponse_Drain:
		s.say(info, "the sidecar is going away: no more runs until it is back")
	} // any other is a later version's
}

func (s *session) attached(now millis, event *anarchonv1.Attached) {
	s.state = attached
	s.instanceID = event.GetInstanceId()
	if s.toldLost {
		s.say(info, "attached again, to instance %s", s.instanceID)
		s.toldLost = false
	} else if !s.wasAttached {
		s.say(info, "attached to instance %s", s.instanceID)
	}
	s.wasAttached = true
	s.setInterval(wireToMillis(event.GetKeepAliveInterval()))
	s.takeLost(now, event.GetLost())
	for _, note := range event.GetNotes() {
		s.say(info, "%s", note)
	}
	// It extends no trust, but shortens it: a sidecar that has come back may have shorter leases.
	s.shortenTrust(now + wireToMillis(event.GetSessionTtl()))
	s.endTrustIfOver(now)
	// Nothing is handed out before this.
	s.keepAliveAt = now
}

func (s *session) assigned(assignment *anarchonv1.Assignment) {
	token := assignment.GetToken()
	if s.running.has(token) || s.finished.has(token) || s.known[token] {
		return // delivered again
	}
	if s.specs[assignment.GetJob()] == nil {
		s.say(failure, "the sidecar sent a run of %q, which we do not have", assignment.GetJob())
		return
	}
	// Started by advance, once there is trust and room.
	s.held.put(token, assignment)
}

func (s *session) streamEnded(now millis, err *SidecarError) {
	s.state = detached
	s.held.clear()
	switch {
	case s.isFatal(err):
		s.fail(now, err)
	case errors.Is(err, ErrSessionNotFound):
		s.reopen(now, notKnown)
	default:
		s.reopen(now, err.Error())
	}
}

// reopen subscribes again after a pause.
func (s *session) reopen(now millis, why string) {
	if s.state == subscribing || s.state == attached {
		s.do(endStream{})
	}
	s.state = detached
	s.held.clear()
	s.stream++ // no event of the old stream counts from here on
	if s.err != nil || s.isClosing {
		return
	}
	s.openAt = now + s.backoff(s.failures)
	s.failures++
	if !s.toldLost && !s.isLeaving {
		s.toldLost = true
		s.say(warning, "%s; subscribing again until that succeeds", why)
	}
}

func (s *session) keepAliveAnswered(now millis, number int, response *anarchonv1.KeepAliveResponse) {
	sent := s.unanswered[number]
	delete(s.unanswered, number)
	isOfThisStream := sent.attachedStream == s.stream && s.state == attached
	if number > s.answered {
		s.answered = number
		// Counted from the sending: what the sidecar promised, it promised after that.
		end := sent.sentAt + wireToMillis(response.GetSessionTtl())
		if isOfThisStream && response.GetStreamOpen() {
			s.setTrust(end)
		} else {
			// Nobody we are attached to: one that was restarted may not even know yet what is in
			// flight, or whether the store still has it as ours.
			s.shortenTrust(end)
		}
		s.takeInterval(now, sent.sentAt, response)
	}
	s.takeLost(now, response.GetLost())
	for _, asked := range sent.tickets {
		s.answerConfirm(asked, slices.Contains(response.GetConfirmed(), asked.token))
	}
	s.endTrustIfOver(now)
	switch {
	case isOfThisStream && !response.GetStreamOpen():
		s.reopen(now, "the sidecar has lost our stream")
	case isOfThisStream:
		s.failures = 0
		if !s.isReady {
			s.isReady = true
			s.do(ready{s.instanceID})
		}
	}
}

func (s *session) takeInterval(now, sentAt millis, response *anarchonv1.KeepAliveResponse) {
	if response.GetKeepAliveInterval() == nil {
		return
	}
	s.setInterval(wireToMillis(response.GetKeepAliveInterval()))
	if s.keepAliveAt != never {
		s.keepAliveAt = min(s.keepAliveAt, max(now, sentAt+s.interval))
	}
}

func (s *session) keepAliveFailed(now millis, number int, err *SidecarError) {
	sent := s.unanswered[number]
	delete(s.unanswered, number)
	s.held.clear()
	for _, asked := range sent.tickets {
		s.do(answerConfirm{asked.ticket, notConfirmed("the sidecar: %v", err)})
	}
	if s.isFatal(err) {
		s.fail(now, err)
	} else if errors.Is(err, ErrSessionNotFound) && sent.attachedStream == s.stream {
		// Trust goes on to its end: a sidecar that has come back adopts what we name.
		s.keepAliveAt = never
		if s.state == attached {
			s.reopen(now, notKnown)
		}
	}
}

func (s *session) receipts(now millis, tokens []string, response *anarchonv1.CompleteResponse) {
	s.isSending = false
	for i, token := range tokens {
		done, there := s.finished.get(token)
		if !there {
			continue // given up meanwhile
		}
		receipt := &anarchonv1.Receipt{}
		if i < len(response.GetReceipts()) {
			receipt = response.GetReceipts()[i]
		}
		refusal, refuses := receiptsThatRefuse[receipt.GetStatus()]
		switch {
		case receipt.GetStatus() == anarchonv1.ReceiptStatus_RECEIPT_STATUS_RECORDED:
			s.finished.take(token)
		case refuses:
			s.finished.take(token)
			s.say(warning, "the result of %s did not count: %s", done.label, cmp.Or(receipt.GetMessage(), refusal))
		default:
			s.sendLater(now, done)
		}
	}
}

var receiptsThatRefuse = map[anarchonv1.ReceiptStatus]string{
	anarchonv1.ReceiptStatus_RECEIPT_STATUS_FENCED:            "its attempt no longer held the lease",
	anarchonv1.ReceiptStatus_RECEIPT_STATUS_UNKNOWN_TOKEN:     "the sidecar knows no such attempt",
	anarchonv1.ReceiptStatus_RECEIPT_STATUS_ALREADY_COMPLETED: "another outcome is in the store",
}

func (s *session) resultsFailed(now millis, tokens []string, err *SidecarError) {
	s.isSending = false
	for _, token := range tokens {
		done, there := s.finished.get(token)
		switch {
		case !there: // given up meanwhile
		case !errors.Is(err, ErrRefused):
			s.sendLater(now, done)
		case len(tokens) > 1:
			done.alone = true
		default:
			s.finished.take(token)
			s.say(failure, "the result of %s is refused: %v", done.label, err)
		}
	}
}

func (s *session) leave(now, grace millis) {
	if !s.isLeaving {
		s.isLeaving = true
		s.stopAt = now
		s.graceEnd = now + grace
		if s.keepAliveAt != never {
			s.keepAliveAt = now
		}
	}
	// A second request may shorten the grace, never lengthen it.
	s.graceEnd = min(s.graceEnd, now+grace)
	longest := cancelGraceDefault
	if s.running.len() > 0 {
		longest = 0
		for _, run := range s.running.all() {
			longest = max(longest, s.cancelGrace(run))
		}
	}
	s.leaveBy = s.graceEnd + longest
}

// fail gives the session up: handlers are stopped, their results still reported.
func (s *session) fail(now millis, err error) {
	if s.err == nil {
		s.err = err
	}
	s.openAt, s.keepAliveAt = never, never
	s.leave(now, 0)
}

func (s *session) sayWhatIsWaitedFor(now millis, hint string) {
	if hint != "" {
		hint = "; " + hint
	}
	if s.running.len() > 0 {
		names := map[string]bool{}
		var left millis
		for _, run := range s.running.all() {
			names[run.assignment.GetJob()] = true
			left = max(left, s.cancelAt(run)-now)
		}
		how := "cancelling"
		if left > 0 {
			how = "waiting up to " + left.text() + " for"
		}
		s.say(info, "stopping: %s %s (%s)%s", how, counted(s.running.len(), "handler"),
			listed(slices.Sorted(maps.Keys(names))), hint)
	} else if s.finished.len() > 0 {
		s.say(info, "stopping: waiting up to %s for %s to be reported",
			(s.leaveBy - now).text(), counted(s.finished.len(), "result"))
	}
}

// ── What follows from the facts and the time ────────────────────────────────────────────────────

func (s *session) advance(now millis) {
	if now >= s.openAt {
		s.open(now)
	}
	s.startHeld(now)
	s.cancelWhenLeaving(now)
	s.giveUpResults(now)
	s.sendResults(now)
	s.refuseIdleConfirms()
	isConfirming := false
	for _, sent := range s.unanswered {
		isConfirming = isConfirming || len(sent.tickets) > 0
	}
	if now >= s.keepAliveAt || (len(s.confirms) > 0 && !isConfirming) {
		s.sendKeepAlive(now)
	}
	s.closeWhenLeft(now)
}

func (s *session) startHeld(now millis) {
	if now >= s.trustEnd || s.isLeaving {
		return
	}
	for token, assignment := range s.held.drain() {
		// A handler that ignores a cancellation keeps its place: the sidecar sends it again.
		if s.running.len() >= int(s.request.GetMaxConcurrency()) {
			continue
		}
		s.remember(token)
		s.running.put(token, &running{assignment: assignment, lostAt: never})
		s.do(startHandler{assignment})
	}
}

func (s *session) open(now millis) {
	s.openAt = never
	s.stream++
	request := proto.CloneOf(s.request)
	request.InFlight = s.inFlight()
	if size := proto.Size(request); size > messageMaxBytes {
		s.fail(now, tooLarge(size))
		return
	}
	s.state = subscribing
	s.do(openStream{s.stream, request})
}

func (s *session) sendKeepAlive(now millis) {
	s.keepAlives++
	tickets := s.confirms
	s.confirms = nil
	sent := &unanswered{sentAt: now, tickets: tickets}
	if s.state == attached {
		sent.attachedStream = s.stream
	}
	s.unanswered[s.keepAlives] = sent
	if s.keepAliveAt != never {
		s.keepAliveAt = now + s.interval
	}
	request := &anarchonv1.KeepAliveRequest{
		SessionId: s.request.GetSessionId(), InFlight: s.inFlight(), Draining: s.isLeaving,
	}
	for _, asked := range tickets {
		if !slices.Contains(request.Confirm, asked.token) {
			request.Confirm = append(request.Confirm, asked.token)
		}
	}
	s.do(sendKeepAlive{s.keepAlives, request, min(s.interval, keepAliveTimeoutMax)})
}

// sendResults sends what has no receipt, one batch at a time: what ends meanwhile goes with the next.
func (s *session) sendResults(now millis) {
	if s.isSending {
		return
	}
	request := &anarchonv1.CompleteRequest{}
	var tokens []string
	size := 0
	for token, done := range s.finished.all() {
		if now < done.sendAt || (done.alone && len(tokens) > 0) {
			continue
		}
		result := &anarchonv1.Result{Token: token, Outcome: done.outcome}
		size += proto.Size(result) + 16 // key and length of a field take less than 16 bytes
		if len(tokens) > 0 && size > resultsMaxBytes {
			break
		}
		tokens = append(tokens, token)
		request.Results = append(request.Results, result)
		if done.alone || len(tokens) == resultsMax {
			break
		}
	}
	if len(tokens) > 0 {
		s.isSending = true
		s.do(sendResults{tokens, request, completeTimeout})
	}
}

func (s *session) giveUpResults(now millis) {
	for token, done := range s.finished.all() {
		if now >= done.giveUpAt {
			s.finished.take(token)
			s.say(failure, "the result of %s could not be reported for %d min, and is given up",
				done.label, done.tellFor/60_000)
		}
	}
}

func (s *session) cancelWhenLeaving(now millis) {
	if !s.isLeaving {
		return
	}
	for token, run := range s.running.all() {
		if !run.cancelled && now >= s.cancelAt(run) {
			s.cancel(now, token, anarchonv1.CancelReason_CANCEL_REASON_SHUTDOWN, "", true)
		}
	}
}

func (s *session) closeWhenLeft(now millis) {
	if !s.isLeaving || s.isClosing {
		return
	}
	if (s.running.len() > 0 || s.finished.len() > 0) && now < s.leaveBy {
		return
	}
	if s.running.len() > 0 {
		var labels []string
		for _, run := range s.running.all() {
			labels = append(labels, labelOf(run.assignment))
		}
		s.say(failure, "handlers that did not stop are left to their leases: %s", strings.Join(labels, ", "))
	}
	// What came too late to be started has surely stopped.
	stopped := slices.Clone(s.held.keys)
	for token, done := range s.finished.all() {
		if done.outcome.GetStopped() != nil {
			stopped = append(stopped, token)
		} else {
			s.say(failure, "the result of %s could not be reported", done.label)
		}
	}
	// A session that another process uses is not ours to close.
	if !s.wasAttached || errors.Is(s.err, ErrSessionReplaced) {
		s.close()
		return
	}
	s.isClosing = true
	s.openAt, s.keepAliveAt = never, never
	request := &anarchonv1.CloseSessionRequest{SessionId: s.request.GetSessionId(), Stopped: stopped}
	s.do(sendClose{request, closeTimeout})
}

func (s *session) close() {
	asked := s.confirms
	for _, sent := range s.unanswered {
		asked = append(asked, sent.tickets...)
	}
	for _, each := range asked {
		s.do(answerConfirm{each.ticket, notConfirmed("the client has stopped")})
	}
	s.state = isClosed
	s.do(endStream{})
	s.do(closed{s.err})
}

// ── Parts ───────────────────────────────────────────────────────────────────────────────────────

// noticeStandstill tells people where our own keep-alive is late: what follows is not the sidecar's fault.
func (s *session) noticeStandstill(now millis) {
	if s.keepAliveAt == never {
		return
	}
	if late := now - s.keepAliveAt; late >= s.interval {
		s.say(warning, "no keep-alive was sent for at least %.1f s: the process stood still, or had no "+
			"processor to run on", late.duration().Seconds())
	}
}

func (s *session) setTrust(end millis) {
	s.trustEnd = end
	s.do(setTrust{end})
}

func (s *session) shortenTrust(end millis) {
	if end < s.trustEnd {
		s.setTrust(end)
	}
}

func (s *session) endTrustIfOver(now millis) {
	if now < s.trustEnd {
		return
	}
	for token, run := range s.running.all() {
		if run.lostAt == never {
			s.cancel(now, token, anarchonv1.CancelReason_CANCEL_REASON_LEASE_LOST, notAnswered, false)
		}
	}
}

func (s *session) takeLost(now millis, lost []*anarchonv1.Cancellation) {
	for _, cancel := range lost {
		s.cancel(now, cancel.GetToken(), cancel.GetReason(), cancel.GetMessage(), false)
	}
}

func (s *session) cancel(now millis, token string, reason anarchonv1.CancelReason, message string, trusted bool) {
	if reason == anarchonv1.CancelReason_CANCEL_REASON_UNSPECIFIED {
		reason = anarchonv1.CancelReason_CANCEL_REASON_LEASE_LOST
	}
	if assignment, isHeld := s.held.take(token); isHeld {
		// It surely never starts, and the sidecar may know it.
		s.remember(token)
		outcome := stoppedOutcome(reason)
		outcome.Elapsed = durationpb.New(0)
		s.report(now, assignment, outcome)
	}
	run, runs := s.running.get(token)
	if !runs {
		return // it has ended
	}
	isNews := !run.cancelled || (run.lostAt == never && !trusted)
	run.cancelled = true
	if !trusted && run.lostAt == never {
		run.lostAt, run.lostBecause = now, reason
	}
	if isNews {
		s.do(cancelHandler{token, reason, message, trusted})
	}
}

// endsTrust reports whether an attempt that is cancelled for the reason is no longer ours.
func endsTrust(reason anarchonv1.CancelReason) bool {
	return reason == anarchonv1.CancelReason_CANCEL_REASON_LEASE_LOST ||
		reason == anarchonv1.CancelReason_CANCEL_REASON_FENCED
}

func stoppedOutcome(reason anarchonv1.CancelReason) *anarchonv1.Outcome {
	return &anarchonv1.Outcome{
		Result: &anarchonv1.Outcome_Stopped{Stopped: &anarchonv1.Stopped{Reason: reason}},
	}
}

func (s *session) report(now millis, assignment *anarchonv1.Assignment, outcome *anarchonv1.Outcome) {
	tellFor := tellFor(assignment)
	s.finished.put(assignment.GetToken(), &finished{
		outcome: outcome, label: labelOf(assignment), giveUpAt: now + tellFor, tellFor: tellFor, sendAt: now,
	})
}

func (s *session) sendLater(now millis, done *finished) {
	done.sendAt = now + s.backoff(done.tries)
	done.tries++
}

// refuseIdleConfirms answers at once what no keep-alive could.
func (s *session) refuseIdleConfirms() {
	var kept []ticketed
	for _, asked := range s.confirms {
		if err := s.lostError(asked.token); err != nil {
			s.do(answerConfirm{asked.ticket, err})
		} else if s.keepAliveAt == never {
			s.do(answerConfirm{asked.ticket, notConfirmed("there is no sidecar now")})
		} else {
			kept = append(kept, asked)
		}
	}
	s.confirms = kept
}

func (s *session) answerConfirm(asked ticketed, isConfirmed bool) {
	err := s.lostError(asked.token)
	if err == nil && !isConfirmed {
		err = notConfirmed("the store could not renew the lease now")
	}
	s.do(answerConfirm{asked.ticket, err})
}

// lostError returns the error of an attempt that is no longer ours, or nil.
func (s *session) lostError(token string) error {
	run, runs := s.running.get(token)
	switch {
	case !runs:
		return &Cancelled{ReasonLeaseLost, "the attempt is over", true}
	case run.lostAt == never:
		return nil
	}
	return &Cancelled{reasonOf(run.lostBecause), "", true}
}

// cancelAt returns when a handler that still runs is cancelled because the client leaves.
func (s *session) cancelAt(run *running) millis {
	spec := s.specs[run.assignment.GetJob()]
	if spec.GetStopGrace() == nil {
		return s.graceEnd
	}
	return min(s.graceEnd, s.stopAt+wireToMillis(spec.GetStopGrace()))
}

func (s *session) cancelGrace(run *running) millis {
	if grace := s.specs[run.assignment.GetJob()].GetCancelGrace(); grace != nil {
		return wireToMillis(grace)
	}
	return cancelGraceDefault
}

func (s *session) isFatal(err *SidecarError) bool {
	// Call tokens are changed while sessions live: a wrong one is an error of the beginning.
	if errors.Is(err, ErrCredentials) && s.wasAttached {
		return false
	}
	return errors.Is(err, ErrSessionReplaced) || errors.Is(err, ErrRefused)
}

func (s *session) setInterval(interval millis) { s.interval = max(interval, keepAliveIntervalMin) }

// backoff doubles from 100 ms to 5 s, and is drawn from the upper half, so that clients spread.
func (s *session) backoff(failures int) millis {
	longest := min(backoffFirst<<min(failures, 10), backoffMax)
	return millis(math.Round(float64(longest) * (0.5 + 0.5*s.random())))
}

func (s *session) remember(token string) {
	if len(s.remembered) == int(s.request.GetMaxConcurrency())+rememberedBeyondConcurrency {
		delete(s.known, s.remembered[0])
		s.remembered = s.remembered[1:]
	}
	s.remembered = append(s.remembered, token)
	s.known[token] = true
}

func (s *session) do(command any) { s.commands = append(s.commands, command) }

func (s *session) say(level level, format string, args ...any) {
	s.do(say{level, fmt.Sprintf(format, args...)})
}

func tooLarge(size int) *SidecarError {
	return &SidecarError{
		Reason: "LIMIT_EXCEEDED",
		Message: fmt.Sprintf("the Subscribe request has %d bytes, and at most %d may be sent: shorten "+
			"labels, or split the jobs between clients", size, messageMaxBytes),
		kind: ErrRefused,
	}
}

func counted(count int, noun string) string {
	if count == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", count, noun)
}

func listed(names []string) string {
	if more := len(names) - namesShown; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:namesShown], ", "), more)
	}
	return strings.Join(names, ", ")
}

func labelOf(assignment *anarchonv1.Assignment) string {
	return fmt.Sprintf("%s %d attempt %d", assignment.GetJob(), assignment.GetSlot(), assignment.GetAttempt())
}

// tellFor returns how long to repeat the result: while the lease can last, the store may still take it.
//
// No clock is read. A slot is claimed when it is due, so that from the slot to the lease's end is the
// lease; for a later attempt it is more, which does no harm.
func tellFor(assignment *anarchonv1.Assignment) millis {
	end := assignment.GetLeaseEndTime()
	if end == nil {
		return completeFor
	}
	lease := millis(end.AsTime().UnixMilli() - assignment.GetSlot())
	return min(max(lease, completeFor), completeForMax)
}

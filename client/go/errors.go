package anarchon

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

// What errors of this package are, to be asked for with [errors.Is].
var (
	// ErrJob: a job, its handler or one of its policies is wrong. The message says what is right.
	ErrJob = errors.New("wrong job")
	// ErrClient: the client is set up wrongly: its address, token file or limits.
	ErrClient = errors.New("wrong client setting")

	// ErrUnavailable: the sidecar is not there, is going away, or cannot reach its store. It may be soon.
	ErrUnavailable = errors.New("sidecar unavailable")
	// ErrRefused: the sidecar will never accept this request. The message is its own.
	ErrRefused = errors.New("refused")
	// ErrUnsupported: the sidecar's backend or version cannot do it. Also an ErrRefused.
	ErrUnsupported = errors.New("unsupported")
	// ErrVersion: client and sidecar are too far apart in version. Also an ErrRefused.
	ErrVersion = errors.New("versions too far apart")
	// ErrCredentials: the call token is missing or wrong. Also an ErrRefused.
	ErrCredentials = errors.New("wrong credentials")
	// ErrNotFound: there is no such job, run or instance.
	ErrNotFound = errors.New("not found")
	// ErrSessionNotFound: the sidecar does not know the session. The client subscribes again by itself.
	ErrSessionNotFound = errors.New("session not found")
	// ErrSessionReplaced: another process uses the session.
	ErrSessionReplaced = errors.New("session replaced")

	// ErrCancelled: the attempt has been asked to stop. The error is a [*Cancelled].
	ErrCancelled = errors.New("cancelled")
	// ErrLeaseLost: the attempt is no longer ours: no further step may be taken. Also an ErrCancelled.
	ErrLeaseLost = errors.New("lease lost")
	// ErrFenced: another attempt of the run has begun. Also an ErrLeaseLost.
	ErrFenced = errors.New("fenced")
	// ErrNotConfirmed: the attempt could not be confirmed at the store now. Do not take the step.
	ErrNotConfirmed = errors.New("not confirmed")
	// ErrStopped: the client was stopped before it was ready.
	ErrStopped = errors.New("the client has stopped")
)

// setupError is an ErrJob or an ErrClient.
type setupError struct {
	kind    error
	message string
}

func (e *setupError) Error() string        { return e.message }
func (e *setupError) Is(target error) bool { return target == e.kind }

func jobError(format string, args ...any) error {
	return &setupError{ErrJob, fmt.Sprintf(format, args...)}
}

func clientError(format string, args ...any) error {
	return &setupError{ErrClient, fmt.Sprintf(format, args...)}
}

// SidecarError is what the sidecar answered, or that it did not.
type SidecarError struct {
	// Reason is a word of the protocol's ErrorReason, or empty.
	Reason string
	// Message is the sidecar's own.
	Message string

	kind error
}

func (e *SidecarError) Error() string { return e.Message }

// Is reports whether the error is of the kind of one of the package's errors.
func (e *SidecarError) Is(target error) bool {
	if target == e.kind {
		return true
	}
	return target == ErrRefused &&
		(e.kind == ErrUnsupported || e.kind == ErrVersion || e.kind == ErrCredentials)
}

var kindByReason = map[string]error{
	"SESSION_NOT_FOUND":  ErrSessionNotFound,
	"SESSION_REPLACED":   ErrSessionReplaced,
	"JOB_NOT_FOUND":      ErrNotFound,
	"RUN_NOT_FOUND":      ErrNotFound,
	"INSTANCE_NOT_FOUND": ErrNotFound,
	"LIMIT_EXCEEDED":     ErrRefused,
	"UNSUPPORTED":        ErrUnsupported,
	"VERSION":            ErrVersion,
	"BAD_CREDENTIALS":    ErrCredentials,
}

var kindByCode = map[codes.Code]error{
	codes.InvalidArgument:    ErrRefused,
	codes.FailedPrecondition: ErrRefused,
	codes.Unimplemented:      ErrVersion,
	codes.Unauthenticated:    ErrCredentials,
	codes.PermissionDenied:   ErrCredentials,
	codes.NotFound:           ErrNotFound,
}

// sidecarError returns what a status means: the reason decides where it is known, else the code;
// any other code is taken as "not now".
func sidecarError(code codes.Code, reason, message string) *SidecarError {
	kind := kindByReason[reason]
	if kind == nil {
		kind = kindByCode[code]
	}
	if kind == nil {
		kind = ErrUnavailable
	}
	if message == "" {
		message = code.String()
	}
	return &SidecarError{Reason: reason, Message: message, kind: kind}
}

func unavailable(format string, args ...any) *SidecarError {
	return sidecarError(codes.Unavailable, "", fmt.Sprintf(format, args...))
}

// CancelReason says why an attempt is to stop.
type CancelReason string

const (
	// ReasonTimeout: the attempt outlived its timeout.
	ReasonTimeout CancelReason = "timeout"
	// ReasonLeaseLost: the lease could not be renewed in time.
	ReasonLeaseLost CancelReason = "lease_lost"
	// ReasonFenced: another attempt has begun.
	ReasonFenced CancelReason = "fenced"
	// ReasonShutdown: the instance is stopping and its grace is used up.
	ReasonShutdown CancelReason = "shutdown"
	// ReasonSuperseded: a newer slot of the job replaces this run.
	ReasonSuperseded CancelReason = "superseded"
	// ReasonRequested: somebody cancelled the run.
	ReasonRequested CancelReason = "requested"
	// ReasonOther: a reason that this version of the client does not know.
	ReasonOther CancelReason = "other"
)

// Cancelled says that the attempt has been asked to stop. It is the cause of the handler's context
// ([context.Cause]) and what [Run.Check] returns. It is an [ErrCancelled]; where the attempt is no
// longer ours, an [ErrLeaseLost] too, and an [ErrFenced] where another attempt has begun.
type Cancelled struct {
	Reason CancelReason
	// Message says more, for people. May be empty.
	Message string

	lost bool
}

func (e *Cancelled) Error() string {
	if e.Message == "" {
		return string(e.Reason)
	}
	return string(e.Reason) + ": " + e.Message
}

// Is reports whether the error is of the kind of one of the package's errors.
func (e *Cancelled) Is(target error) bool {
	switch target {
	case ErrCancelled:
		return true
	case ErrLeaseLost:
		return e.lost
	case ErrFenced:
		return e.lost && e.Reason == ReasonFenced
	}
	return false
}

type notConfirmedError struct{ message string }

func (e *notConfirmedError) Error() string        { return e.message }
func (e *notConfirmedError) Is(target error) bool { return target == ErrNotConfirmed }

func notConfirmed(format string, args ...any) error {
	return &notConfirmedError{fmt.Sprintf(format, args...)}
}

// ── For handlers to return ──────────────────────────────────────────────────────────────────────

// RetryError is what [Retry] returns.
type RetryError struct {
	// After is the pause before the next attempt, instead of the policy's. Zero: the policy's.
	After time.Duration

	cause error
}

func (e *RetryError) Error() string { return messageOf(e.cause, "to be tried again") }
func (e *RetryError) Unwrap() error { return e.cause }

// Retry says that the attempt failed with err, and is to be tried again after the pause `after`
// instead of the policy's; zero leaves the pause to the policy. Whether there is a next attempt is
// the policy's to say: [Retries], by default none. The pause is cut to whole milliseconds.
func Retry(err error, after time.Duration) error {
	if after != 0 && after < time.Millisecond {
		return jobError("Retry after %v: must be at least 1ms, or 0 for the policy's pause", after)
	}
	return &RetryError{After: after.Truncate(time.Millisecond), cause: err}
}

// PermanentError is what [Permanent] returns.
type PermanentError struct{ cause error }

func (e *PermanentError) Error() string { return messageOf(e.cause, "not to be tried again") }
func (e *PermanentError) Unwrap() error { return e.cause }

// Permanent says that the attempt failed with err, and that trying again is of no use: the run has
// failed, whatever [Retries] says.
func Permanent(err error) error { return &PermanentError{cause: err} }

func messageOf(err error, instead string) string {
	if err == nil {
		return instead
	}
	return err.Error()
}

// typeOf returns the error's type as its users write it, of the innermost cause of a Retry or a Permanent.
func typeOf(err error) string {
	switch own := err.(type) {
	case *RetryError:
		if own.cause != nil {
			return typeOf(own.cause)
		}
	case *PermanentError:
		if own.cause != nil {
			return typeOf(own.cause)
		}
	}
	return strings.TrimPrefix(fmt.Sprintf("%T", err), "*")
}

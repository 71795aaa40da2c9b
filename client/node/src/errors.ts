/**
 * The errors of the client, and what a gRPC status becomes.
 *
 * ```text
 * AnarchonError
 * ├── JobError                      a job, a handler or a policy is wrong; thrown where it is written
 * ├── ClientError                   the client is set up wrongly: address, token file, limits
 * ├── SidecarError                  what the sidecar answered, or that it did not
 * │   ├── SidecarUnavailableError   not there, or not now: tried again by itself
 * │   ├── RefusedError              this request will never be accepted: change it
 * │   │   ├── UnsupportedError      the sidecar's backend or version cannot do it
 * │   │   ├── VersionError          client and sidecar are too far apart
 * │   │   └── CredentialsError      the call token is missing or wrong
 * │   ├── NotFoundError             no such job, run or instance
 * │   ├── SessionNotFoundError      the sidecar does not know the session: subscribed again by itself
 * │   └── SessionReplacedError      another process uses this session
 * ├── CancelledError                thrown by `ctx.check()`: the attempt is to stop
 * │   └── LeaseLostError            ... and no longer ours: no further step may be taken
 * │       └── FencedError           ... because another attempt has begun
 * ├── NotConfirmedError             thrown by `ctx.confirm()`: could not be confirmed now
 * ├── Retry                         throw it in a handler: failed, try again after that long
 * └── Permanent                     throw it in a handler: failed, do not try again
 * ```
 */

import { inspect } from 'node:util';
import { parseDuration, type Duration } from './duration';

/** Everything that Anarchon throws. */
export class AnarchonError extends Error {
  constructor(message = '', options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** A job, its handler or one of its policies is wrong. The message says what would be right. */
export class JobError extends AnarchonError {}

/** The client is set up wrongly: its address, token file or limits. */
export class ClientError extends AnarchonError {}

// ── The sidecar's answers ───────────────────────────────────────────────────────────────────────

/** What the sidecar answered. */
export class SidecarError extends AnarchonError {
  constructor(
    message: string,
    /** A word of the protocol's ErrorReason, such as `"STORE_UNAVAILABLE"`, or empty. */
    readonly reason = '',
  ) {
    super(message);
  }
}

/** The sidecar is not there, is going away, or cannot reach its store. It may be soon. */
export class SidecarUnavailableError extends SidecarError {}

/** The sidecar will never accept this request. The message is its own. */
export class RefusedError extends SidecarError {}

/**
 * The backend behind the sidecar cannot do what was asked, or this version cannot. The message says
 * which backends can.
 */
export class UnsupportedError extends RefusedError {}

/** Client and sidecar are too far apart in version. */
export class VersionError extends RefusedError {}

/** The call token is missing or wrong. */
export class CredentialsError extends RefusedError {}

/** There is no such job, run or instance. */
export class NotFoundError extends SidecarError {}

/** The sidecar does not know the session. The client subscribes again by itself. */
export class SessionNotFoundError extends SidecarError {}

/** Another stream took the session over: two processes use one session identifier. */
export class SessionReplacedError extends SidecarError {}

type SidecarErrorKind = new (message: string, reason?: string) => SidecarError;

const BY_REASON = new Map<string, SidecarErrorKind>([
  ['SESSION_NOT_FOUND', SessionNotFoundError],
  ['SESSION_REPLACED', SessionReplacedError],
  ['JOB_NOT_FOUND', NotFoundError],
  ['RUN_NOT_FOUND', NotFoundError],
  ['INSTANCE_NOT_FOUND', NotFoundError],
  ['LIMIT_EXCEEDED', RefusedError],
  ['UNSUPPORTED', UnsupportedError],
  ['VERSION', VersionError],
  ['BAD_CREDENTIALS', CredentialsError],
]);

const BY_CODE = new Map<string, SidecarErrorKind>([
  ['INVALID_ARGUMENT', RefusedError],
  ['FAILED_PRECONDITION', RefusedError],
  ['UNIMPLEMENTED', VersionError],
  ['UNAUTHENTICATED', CredentialsError],
  ['PERMISSION_DENIED', CredentialsError],
  ['NOT_FOUND', NotFoundError],
]);

/**
 * The error for a gRPC status: its code's name and the trailer `anarchon-reason`. The reason decides
 * where it is known, else the code; any other code is taken as "not now".
 */
export function errorFromStatus(code: string, reason: string, message: string): SidecarError {
  const kind = BY_REASON.get(reason) ?? BY_CODE.get(code) ?? SidecarUnavailableError;
  return new kind(message || code, reason);
}

// ── Cancellation ────────────────────────────────────────────────────────────────────────────────

/**
 * Why an attempt is to stop.
 *
 * - `timeout`: it outlived its timeout.
 * - `lease_lost`: the lease could not be renewed in time.
 * - `fenced`: another attempt has begun.
 * - `shutdown`: the instance is stopping and its grace is used up.
 * - `superseded`: a newer slot of the job replaces this run.
 * - `requested`: somebody cancelled the run.
 * - `other`: a reason that this version of the client does not know.
 */
export type CancelReason =
  'timeout' | 'lease_lost' | 'fenced' | 'shutdown' | 'superseded' | 'requested' | 'other';

/** The attempt has been asked to stop: finish quickly, or just let this through. */
export class CancelledError extends AnarchonError {
  constructor(
    /** Why. The first reason stays, whatever comes after. */
    readonly reason: CancelReason,
    message = '',
  ) {
    super(message ? `${reason}: ${message}` : reason);
  }
}

/** The attempt can no longer be trusted to be the only one: take no further step. */
export class LeaseLostError extends CancelledError {}

/** Another attempt of the run has begun: take no further step. */
export class FencedError extends LeaseLostError {}

/** The error of an attempt that is no longer ours, for `reason`. */
export function lostError(reason: CancelReason, message = ''): LeaseLostError {
  return reason === 'fenced'
    ? new FencedError(reason, message)
    : new LeaseLostError(reason, message);
}

/** The attempt could not be confirmed at the store now. Do not take the step; try again. */
export class NotConfirmedError extends AnarchonError {}

// ── For handlers to throw ───────────────────────────────────────────────────────────────────────

/** What `Retry` takes besides its message. */
export interface RetryOptions extends ErrorOptions {
  /** The pause before the next attempt, more than zero. Default: as the job's policy has it. */
  after?: Duration | undefined;
}

/**
 * Thrown by a handler: the attempt failed; try again after `after`.
 *
 * Whether there is a next retry is the policy's to say: `retries`, by default none. `cause` is the
 * error behind it, whose type and message history then shows. Throws `JobError` for a bad duration.
 */
export class Retry extends AnarchonError {
  /** The pause asked for, in milliseconds; `undefined` leaves it to the policy. */
  readonly afterMs: number | undefined;

  constructor(message = '', options: RetryOptions = {}) {
    super(message, 'cause' in options ? { cause: options.cause } : undefined);
    this.afterMs = options.after === undefined ? undefined : retryAfterMs(options.after);
  }
}

/**
 * Thrown by a handler: the attempt failed, and trying again is of no use. The run has failed,
 * whatever `retries` says. `cause` is the error behind it.
 */
export class Permanent extends AnarchonError {}

function retryAfterMs(after: unknown): number {
  const what = `Retry after ${show(after)}`;
  const afterMs = asDuration(what, after, JobError);
  if (afterMs === 0) throw new JobError(`${what}: must be more than zero`);
  return afterMs;
}

// ── Saying what is wrong ────────────────────────────────────────────────────────────────────────

/** A value in an error's message: as JavaScript writes it, on one line, not too long. */
export function show(value: unknown): string {
  const text = inspect(value, { breakLength: Infinity, depth: 1 });
  return text.length > 80 ? `${text.slice(0, 79)}…` : text;
}

/** The milliseconds of a duration that the user wrote. Throws `kind` with `what` in front. */
export function asDuration(
  what: string,
  value: unknown,
  kind: new (message: string) => AnarchonError,
): number {
  try {
    return parseDuration(value);
  } catch (error) {
    throw new kind(`${what}: ${(error as RangeError).message}`);
  }
}

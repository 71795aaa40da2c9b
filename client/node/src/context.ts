/**
 * What a handler sees: its attempt, whether it may still go on, and the orders it has been given.
 * Imports the wire's messages, the clock, the durations and the errors.
 */

import { inspect } from 'node:util';
import type { Clock } from './clock';
import { wireToMs, type Duration } from './duration';
import { asDuration, CancelledError, JobError, lostError, show, type CancelReason } from './errors';
import { CancelReason as WireReason, Trigger as WireTrigger } from './generated/anarchon/v1/run_pb';
import type { Assignment } from './generated/anarchon/v1/session_pb';
import { prefixed, type Logger } from './logger';

export const NOT_ANSWERED = 'no keep-alive was answered in time';
/** No timer of node's waits for longer. */
const TIMER_MAX_MS = 2 ** 31 - 1;

/** Until when the session is to be trusted, by the session's clock. Written by the session alone. */
export interface Trust {
  endMs: number;
}

/**
 * What one attempt has been told, by the sidecar or by the clock.
 *
 * Trust that has ended stays ended for the attempt, also when the session regains it: in between
 * another instance may have begun.
 */
export class Orders {
  /** Aborted when the attempt is to stop. */
  readonly cancellation = new AbortController();
  /** Aborted when the attempt is no longer ours. */
  readonly loss = new AbortController();
  trusted = true;
  /** The first reason to stop, once there is one. */
  reason: CancelReason | undefined;
  /** The same, as the number that came. */
  wireReason = WireReason.UNSPECIFIED;
  message = '';

  constructor(
    private readonly clock: Clock,
    private readonly trust: Readonly<Trust>,
  ) {}

  /** Tell the attempt to stop. The first reason stays. */
  cancel(wireReason: WireReason, message: string, trusted: boolean): void {
    if (this.reason === undefined) {
      this.reason = reasonOf(wireReason);
      this.wireReason = wireReason;
      this.message = message;
    }
    this.trusted &&= trusted;
    const error = this.error(this.reason);
    this.cancellation.abort(error);
    if (!this.trusted) this.loss.abort(error);
  }

  /** Let the clock have its word: end the attempt's trust if its time is over. */
  look(): void {
    if (this.trusted && this.clock.nowMs() >= this.trust.endMs) {
      this.cancel(WireReason.LEASE_LOST, NOT_ANSWERED, false);
    }
  }

  /** Throw `CancelledError`, or its kind that fits, if the attempt is to stop. */
  check(): void {
    this.look();
    if (this.reason !== undefined) throw this.error(this.reason);
  }

  private error(reason: CancelReason): CancelledError {
    return this.trusted
      ? new CancelledError(reason, this.message)
      : lostError(reason, this.message);
  }
}

const REASONS = new Map<WireReason, CancelReason>([
  [WireReason.TIMEOUT, 'timeout'],
  [WireReason.LEASE_LOST, 'lease_lost'],
  [WireReason.FENCED, 'fenced'],
  [WireReason.SHUTDOWN, 'shutdown'],
  [WireReason.SUPERSEDED, 'superseded'],
  [WireReason.REQUESTED, 'requested'],
]);

/** The word for a reason received; one that is not known is `other`. */
export function reasonOf(wireReason: WireReason): CancelReason {
  return REASONS.get(wireReason) ?? 'other';
}

/** The number for a reason; `other` has none. */
export function wireReasonOf(reason: CancelReason): WireReason {
  const entry = [...REASONS].find(([, word]) => word === reason);
  return entry?.[0] ?? WireReason.UNSPECIFIED;
}

/**
 * What caused a run: its schedule, somebody who triggered it, a missed slot that is caught up, or
 * something that this version of the client does not know.
 */
export type Trigger = 'schedule' | 'manual' | 'catch_up' | 'other';

const TRIGGERS = new Map<WireTrigger, Trigger>([
  [WireTrigger.SCHEDULE, 'schedule'],
  [WireTrigger.MANUAL, 'manual'],
  [WireTrigger.CATCH_UP, 'catch_up'],
]);

/** One attempt at one run, as its handler sees it. */
export class Context {
  /** The job's name. */
  readonly job: string;
  /** The slot: whole milliseconds since 1970-01-01T00:00:00Z. */
  readonly slot: number;
  /** The slot as a time. */
  readonly scheduledAt: Date;
  /** 1 at first, 2 or more after a takeover or a failure. */
  readonly attempt: number;
  /** Names this attempt, and is all the authority needed to complete it: not for logs. Opaque. */
  readonly token: string;
  /** Grows with every claim of the job: for systems downstream that must refuse a late writer. */
  readonly fence: bigint;
  /** The instance that holds the claim, as history shows it. */
  readonly instanceId: string;
  /** What caused the run. */
  readonly trigger: Trigger;
  /** What was given when the run was triggered; empty for scheduled runs. */
  readonly payload: Buffer;
  /** When the attempt's `timeout` is over, by this machine's clock. `undefined`: no limit. */
  readonly deadline: Date | undefined;
  /** A logger whose messages say of which attempt they speak. */
  readonly log: Logger;
  private readonly deadlineMs: number | undefined;
  private readonly label: string;

  /** @internal */
  constructor(
    assignment: Assignment,
    private readonly orders: Orders,
    private readonly clock: Clock,
    private readonly askToConfirm: () => Promise<void>,
    logger: Logger,
  ) {
    this.job = assignment.job;
    this.slot = Number(assignment.slot);
    this.scheduledAt = new Date(this.slot);
    this.attempt = assignment.attempt;
    this.token = assignment.token;
    this.fence = assignment.fence;
    this.instanceId = assignment.instanceId;
    this.trigger = TRIGGERS.get(assignment.trigger) ?? 'other';
    this.payload = Buffer.from(assignment.payload);
    this.label = labelOf(assignment);
    this.log = prefixed(logger, this.label);
    if (assignment.timeout !== undefined) {
      const timeoutMs = wireToMs(assignment.timeout);
      this.deadlineMs = clock.nowMs() + timeoutMs;
      this.deadline = new Date(Date.now() + timeoutMs);
    }
  }

  /** What is left of the attempt's `timeout`, in milliseconds, never below zero. `undefined`: no limit. */
  get remainingMs(): number | undefined {
    if (this.deadlineMs === undefined) return undefined;
    return Math.max(0, this.deadlineMs - this.clock.nowMs());
  }

  /** Whether the attempt is to stop. Looks at the clock, too. */
  get cancelled(): boolean {
    this.orders.look();
    return this.orders.reason !== undefined;
  }

  /**
   * Aborted when the attempt is to stop, with a `CancelledError` as its reason: to hand on to `fetch`,
   * timers, and whatever else takes an `AbortSignal`. An error that comes of it may be let through.
   */
  get signal(): AbortSignal {
    return this.orders.cancellation.signal;
  }

  /**
   * Aborted when the attempt is no longer ours, and no further step may be taken; that may come after
   * `signal`, while a handler that was asked to stop is tidying up.
   */
  get lostSignal(): AbortSignal {
    return this.orders.loss.signal;
  }

  /**
   * Throw if the attempt is to stop, or if its lease can no longer be trusted. Cheap: no call is made.
   *
   * Throws `CancelledError`; where the attempt is no longer ours, its kinds `LeaseLostError` or
   * `FencedError`.
   */
  check(): void {
    this.orders.check();
  }

  /**
   * Have the lease renewed at the store now: the thing to do just before what cannot be undone. Takes
   * one round trip to the store.
   *
   * Throws `LeaseLostError` or `FencedError` if the attempt is no longer ours, `NotConfirmedError` if
   * that cannot be told now, and `CancelledError` if it is to stop.
   */
  async confirm(): Promise<void> {
    this.check();
    await this.askToConfirm();
    this.check();
  }

  /**
   * Wait for `duration`, but no longer than until a cancellation; then throw as `check()` does.
   * Throws `JobError` for a bad duration.
   */
  async sleep(duration: Duration): Promise<void> {
    const lengthMs = asDuration(`sleep(${show(duration)})`, duration, JobError);
    const endMs = this.clock.nowMs() + lengthMs;
    for (
      let leftMs = lengthMs;
      leftMs > 0 && !this.cancelled;
      leftMs = endMs - this.clock.nowMs()
    ) {
      await this.pause(Math.min(leftMs, TIMER_MAX_MS));
    }
    this.check();
  }

  /**
   * What loggers show of it: the token does not belong in logs.
   *
   * @internal
   */
  [inspect.custom](): string {
    return `Context { ${this.label} }`;
  }

  /** Wait for so long, or until the cancellation. */
  private pause(lengthMs: number): Promise<void> {
    return new Promise((resolve) => {
      const done = () => {
        clearTimeout(timer);
        this.signal.removeEventListener('abort', done);
        resolve();
      };
      const timer = setTimeout(done, lengthMs);
      this.signal.addEventListener('abort', done);
    });
  }
}

/** An attempt in words, for logs: its token does not belong there. */
export function labelOf(assignment: Assignment): string {
  return `${assignment.job} ${assignment.slot} attempt ${assignment.attempt}`;
}

/**
 * Runs handlers, tells them to stop, and turns what they return or throw into an outcome. Imports the
 * wire's messages, the context, the jobs and the errors.
 */

import { create } from '@bufbuild/protobuf';
import { inspect } from 'node:util';
import type { Clock } from './clock';
import { Context, Orders, type Trust } from './context';
import { toWire } from './duration';
import { CancelledError, Permanent, Retry, type CancelReason } from './errors';
import {
  CancelReason as WireReason,
  FailureSchema,
  OutcomeSchema,
  StoppedSchema,
  SuccessSchema,
  type Failure,
  type Outcome,
} from './generated/anarchon/v1/run_pb';
import type { Assignment } from './generated/anarchon/v1/session_pb';
import type { Job } from './jobs';
import type { Logger } from './logger';

const RESULT_MAX_BYTES = 16 * 1024;
const MESSAGE_MAX_BYTES = 4 * 1024;
const TRACE_MAX_BYTES = 16 * 1024;
const STOPPED_AS_ASKED: readonly CancelReason[] = ['shutdown', 'superseded', 'requested'];

/** Whom a runner tells, and asks. */
export interface RunnerHooks {
  /** A handler has ended. */
  ended(token: string, outcome: Outcome): void;
  /** A handler has ended after `abandon()`. */
  endedLate(): void;
  /** Renew a lease, or throw. */
  confirm(token: string): Promise<void>;
}

/** An attempt whose handler runs. */
interface Attempt {
  readonly context: Context;
  readonly orders: Orders;
}

/** Runs the handlers of one session. */
export class Runner {
  private readonly attempts = new Map<string, Attempt>();
  private readonly waiting: (() => void)[] = [];
  private isAbandoned = false;

  constructor(
    private readonly jobs: ReadonlyMap<string, Job>,
    private readonly clock: Clock,
    private readonly trust: Readonly<Trust>,
    private readonly logger: Logger,
    private readonly hooks: RunnerHooks,
  ) {}

  /** Whether any handler runs. */
  get isRunning(): boolean {
    return this.attempts.size > 0;
  }

  /** Run the handler of an attempt, once the loop comes round to it. */
  start(assignment: Assignment): void {
    const { token, job: name } = assignment;
    const job = this.jobs.get(name);
    if (job === undefined) throw new Error(`there is no job ${name}`);
    const orders = new Orders(this.clock, this.trust);
    const confirm = () => this.hooks.confirm(token);
    const context = new Context(assignment, orders, this.clock, confirm, this.logger);
    this.attempts.set(token, { context, orders });
    this.waiting.push(() => void this.run(job, context, orders));
    if (this.waiting.length === 1) setImmediate(this.startNext);
  }

  /** Tell a handler to stop; a second time if its trust has ended since the first. */
  cancel(token: string, reason: WireReason, message: string, trusted: boolean): void {
    this.attempts.get(token)?.orders.cancel(reason, message, trusted);
  }

  /** Tell all that is left that nobody renews its lease any more. Its results are lost. */
  abandon(): void {
    this.isAbandoned = true;
    for (const token of this.attempts.keys()) {
      this.cancel(token, WireReason.LEASE_LOST, 'the client has stopped', false);
    }
  }

  /** One a turn of the loop: handlers that are not async must not hold up the keep-alives together. */
  private readonly startNext = (): void => {
    this.waiting[0]?.();
    this.waiting.shift();
    if (this.waiting.length > 0) setImmediate(this.startNext);
  };

  /** Never rejects: whatever the handler does is its outcome. */
  private async run({ handler }: Job, context: Context, orders: Orders): Promise<void> {
    const startedAtMs = this.clock.nowMs();
    let outcome: Outcome;
    try {
      // Others had their turns since it was to start: what was told to stop meanwhile never begins.
      orders.check();
      // The value becomes text here, because that may run the handler's own code.
      outcome = outcomeOfResult(textOf(await handler(context)));
    } catch (error) {
      outcome = outcomeOfError(error, orders);
    }
    outcome.elapsed = toWire(this.clock.nowMs() - startedAtMs);
    this.attempts.delete(context.token);
    if (this.isAbandoned) {
      context.log.warn('ended after its client had stopped: its result is lost');
      this.hooks.endedLate();
    } else {
      this.hooks.ended(context.token, outcome);
      // After the report: what the application's logging does must not hold it up.
      tell(context.log, outcome, orders);
    }
  }
}

/** Log how an attempt ended that has not succeeded: the application's people look there first. */
function tell(log: Logger, { result }: Outcome, orders: Orders): void {
  if (result.case === 'failure') {
    const { type, message, stackTrace } = result.value;
    log.error(`failed: ${stackTrace || `${type}: ${message}`}`);
  } else if (result.case === 'stopped' && orders.reason !== undefined) {
    const why = orders.message ? `${orders.reason}: ${orders.message}` : orders.reason;
    if (STOPPED_AS_ASKED.includes(orders.reason)) log.info(`stopped (${why})`);
    else log.warn(`stopped (${why})`);
  }
}

// ── Outcomes ────────────────────────────────────────────────────────────────────────────────────

function outcomeOfResult(result: string): Outcome {
  const value = create(SuccessSchema, { result });
  return create(OutcomeSchema, { result: { case: 'success', value } });
}

/** Nothing as nothing, a text as it is, all else as JSON, or as node shows it; cut. */
function textOf(value: unknown): string {
  if (value === undefined || value === null) return '';
  return cutEnd(typeof value === 'string' ? value : jsonOf(value), RESULT_MAX_BYTES);
}

function jsonOf(value: unknown): string {
  try {
    // There is none for functions and symbols, whatever the type says.
    const text: unknown = JSON.stringify(value);
    return typeof text === 'string' ? text : inspect(value);
  } catch (error) {
    // A bigint, a cycle, or too deep. What the value's own code throws is the handler's error.
    if (error instanceof TypeError || error instanceof RangeError) return inspect(value);
    throw error;
  }
}

/** Never throws, whatever the error's own code does: the attempt would never end. */
function outcomeOfError(error: unknown, orders: Orders): Outcome {
  let failure: Failure;
  try {
    if (orders.reason !== undefined && isObedience(error, orders)) {
      const value = create(StoppedSchema, { reason: orders.wireReason });
      return create(OutcomeSchema, { result: { case: 'stopped', value } });
    }
    failure = failureOf(error);
  } catch {
    failure = create(FailureSchema, { type: 'unknown', message: 'its error cannot be read' });
  }
  return create(OutcomeSchema, { result: { case: 'failure', value: failure } });
}

/** Whether a handler that was told to stop did so: by `check()`, or by what it gave the signal to. */
function isObedience(error: unknown, orders: Orders): boolean {
  if (error instanceof CancelledError) return true;
  if (!(error instanceof Error)) return false;
  return error.name === 'AbortError' || error.cause === orders.cancellation.signal.reason;
}

function failureOf(error: unknown): Failure {
  const asked = error instanceof Retry || error instanceof Permanent ? error : undefined;
  // What a handler wants said of a failure it may put around the error itself.
  const cause = asked?.cause;
  const message = messageOf(error) || (cause === undefined ? '' : messageOf(cause));
  const failure = create(FailureSchema, {
    type: cutEnd(typeOf(cause ?? error), MESSAGE_MAX_BYTES),
    message: cutEnd(message, MESSAGE_MAX_BYTES),
    stackTrace: cutStart(traceOf(error), TRACE_MAX_BYTES),
    permanent: error instanceof Permanent,
  });
  if (error instanceof Retry && error.afterMs !== undefined) {
    failure.retryAfter = toWire(error.afterMs);
  }
  return failure;
}

/** An error's name; its class's where the class has left the name as it was. */
function typeOf(error: unknown): string {
  if (!(error instanceof Error)) return error === null ? 'null' : typeof error;
  return error.name === 'Error' ? error.constructor.name : error.name;
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : textOf(error);
}

/** The stack, and those of the errors behind it. */
function traceOf(error: unknown): string {
  return error instanceof Error ? inspect(error) : '';
}

/** The beginning of a text, cut between characters. */
function cutEnd(text: string, maxBytes: number): string {
  const bytes = Buffer.from(text);
  if (bytes.length <= maxBytes) return text;
  let end = maxBytes;
  while (isInsideCharacter(bytes[end])) end -= 1;
  return bytes.toString('utf8', 0, end);
}

/** The end of a text, cut between characters. */
function cutStart(text: string, maxBytes: number): string {
  const bytes = Buffer.from(text);
  let start = Math.max(0, bytes.length - maxBytes);
  while (isInsideCharacter(bytes[start])) start += 1;
  return bytes.toString('utf8', start);
}

function isInsideCharacter(byte: number | undefined): boolean {
  return byte !== undefined && (byte & 0xc0) === 0x80;
}

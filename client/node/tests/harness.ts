/** A session in a test's hands: facts in, commands out, time as a number. */

import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { timestampFromMs } from '@bufbuild/protobuf/wkt';
import assert from 'node:assert/strict';
import { toWire } from '../src/duration';
import { SidecarUnavailableError, type SidecarError } from '../src/errors';
import type { JobSpecSchema } from '../src/generated/anarchon/v1/job_pb';
import {
  OutcomeSchema,
  type CancelReason,
  type Outcome,
} from '../src/generated/anarchon/v1/run_pb';
import {
  CompleteResponseSchema,
  KeepAliveResponseSchema,
  ReceiptStatus,
  SubscribeRequestSchema,
  SubscribeResponseSchema,
} from '../src/generated/anarchon/v1/session_pb';
import { Session, type Command, type Fact } from '../src/session';

export const TTL_MS = 15_000;
export const INTERVAL_MS = 5_000;
export const AWAY = new SidecarUnavailableError('no sidecar: the test says so');

export type Of<K extends Command['kind']> = Extract<Command, { kind: K }>;
export type Lost = readonly { token: string; reason?: CancelReason }[];

export function success(result = 'done'): Outcome {
  return create(OutcomeSchema, { result: { case: 'success', value: { result } } });
}

export function stopped(reason: CancelReason): Outcome {
  return create(OutcomeSchema, { result: { case: 'stopped', value: { reason } } });
}

/** Keeps the time and the last commands; `spread` is what chance draws. */
export class Harness {
  readonly session: Session;
  nowMs = 1_000_000;
  commands: Command[] = [];
  /** The stream that was opened last. */
  stream = 0;

  constructor({
    jobs = [{ name: 'sync' }],
    maxConcurrency = 10,
    spread = 0,
  }: {
    jobs?: MessageInitShape<typeof JobSpecSchema>[];
    maxConcurrency?: number;
    spread?: number;
  } = {}) {
    const request = create(SubscribeRequestSchema, { sessionId: 'session', jobs, maxConcurrency });
    this.session = new Session(request, () => spread);
    this.feed({ kind: 'start' });
  }

  /** A session that is attached and trusted. */
  static attached(options: ConstructorParameters<typeof Harness>[0] = {}): Harness {
    const harness = new Harness(options);
    harness.attachAndTrust();
    return harness;
  }

  feed(fact: Fact): void {
    this.commands = this.session.handle(this.nowMs, fact);
    for (const { stream } of this.all('openStream')) this.stream = stream;
    const { wakeAtMs } = this.session;
    assert.ok(wakeAtMs === undefined || wakeAtMs > this.nowMs, 'a loop that never rests');
  }

  all<K extends Command['kind']>(kind: K): Of<K>[] {
    return this.commands.filter((command): command is Of<K> => command.kind === kind);
  }

  one<K extends Command['kind']>(kind: K): Of<K> {
    const [command, ...more] = this.all(kind);
    assert.ok(command !== undefined && more.length === 0, `${more.length} more of ${kind}`);
    return command;
  }

  none(kind: Command['kind']): void {
    assert.deepEqual(this.all(kind), []);
  }

  tick(): void {
    this.feed({ kind: 'tick' });
  }

  /** Let time pass, waking the session whenever it wants; its commands are all of that time's. */
  wait(forMs: number): void {
    const untilMs = this.nowMs + forMs;
    const done: Command[] = [];
    for (;;) {
      const { wakeAtMs } = this.session;
      if (wakeAtMs === undefined || wakeAtMs > untilMs) break;
      this.nowMs = wakeAtMs;
      this.tick();
      done.push(...this.commands);
    }
    this.nowMs = untilMs;
    this.commands = done;
  }

  // ── What a sidecar does ───────────────────────────────────────────────────────────────────────

  event(event: MessageInitShape<typeof SubscribeResponseSchema>['event']): void {
    const message = event === undefined ? {} : { event };
    this.feed({
      kind: 'streamEvent',
      stream: this.stream,
      event: create(SubscribeResponseSchema, message),
    });
  }

  /** Answer the Subscribe that was last sent, and leave the keep-alive that follows open. */
  attach({ ttlMs = TTL_MS, lost = [] }: { ttlMs?: number; lost?: Lost } = {}): void {
    const value = {
      instanceId: 'one',
      keepAliveInterval: toWire(INTERVAL_MS),
      sessionTtl: toWire(ttlMs),
      lost: [...lost],
    };
    this.event({ case: 'attached', value });
  }

  attachAndTrust(): void {
    this.attach();
    this.answer(this.one('sendKeepAlive'));
  }

  /** Hand out runs of slot 1, without a lease's end unless there is a lease. */
  assign(
    tokens: string[],
    { job = 'sync', leaseMs }: { job?: string; leaseMs?: number } = {},
  ): void {
    const lease = leaseMs === undefined ? {} : { leaseEndTime: timestampFromMs(1 + leaseMs) };
    const assignments = tokens.map((token) => ({
      token,
      job,
      slot: 1n,
      attempt: 1,
      fence: 1n,
      ...lease,
    }));
    this.event({ case: 'runs', value: { assignments } });
  }

  cancel(token: string, reason: CancelReason): void {
    this.event({ case: 'cancel', value: { token, reason } });
  }

  answer(
    { number }: Of<'sendKeepAlive'>,
    {
      ttlMs = TTL_MS,
      streamOpen = true,
      lost = [],
      confirmed = [],
      intervalMs,
    }: {
      ttlMs?: number;
      streamOpen?: boolean;
      lost?: Lost;
      confirmed?: string[];
      intervalMs?: number;
    } = {},
  ): void {
    const response = create(KeepAliveResponseSchema, {
      sessionTtl: toWire(ttlMs),
      streamOpen,
      lost: [...lost],
      confirmed,
    });
    if (intervalMs !== undefined) response.keepAliveInterval = toWire(intervalMs);
    this.feed({ kind: 'keepAliveAnswered', number, response });
  }

  fail({ number }: Of<'sendKeepAlive'>, error: SidecarError = AWAY): void {
    this.feed({ kind: 'keepAliveFailed', number, error });
  }

  loseStream(error: SidecarError = AWAY): void {
    this.feed({ kind: 'streamEnded', stream: this.stream, error });
  }

  /** Wait for the keep-alive that is due next. */
  nextKeepAlive(): Of<'sendKeepAlive'> {
    this.wait(INTERVAL_MS);
    return this.one('sendKeepAlive');
  }

  end(token: string, outcome: Outcome = success()): void {
    this.feed({ kind: 'handlerEnded', token, outcome });
  }

  /** Answer results; by default all are recorded. */
  receive({ tokens }: Of<'sendResults'>, status = ReceiptStatus.RECORDED): void {
    const response = create(CompleteResponseSchema, { receipts: tokens.map(() => ({ status })) });
    this.feed({ kind: 'resultsAnswered', tokens, response });
  }

  failResults({ tokens }: Of<'sendResults'>, error: SidecarError = AWAY): void {
    this.feed({ kind: 'resultsFailed', tokens, error });
  }
}

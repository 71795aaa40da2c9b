/** Handlers, their contexts, and what becomes of what they do. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { inspect } from 'node:util';
import type { Clock } from '../src/clock';
import type { Context, Trust } from '../src/context';
import {
  CancelledError,
  FencedError,
  JobError,
  LeaseLostError,
  NotConfirmedError,
  Permanent,
  Retry,
} from '../src/errors';
import { wireToMs } from '../src/duration';
import { CancelReason, type Outcome } from '../src/generated/anarchon/v1/run_pb';
import { collect, every, type Handler } from '../src/jobs';
import { Runner } from '../src/runner';
import { cancel, makeAssignment, makeContext } from '../src/testing';
import { MemoryLogger } from './memory_logger';

class Stage {
  readonly clock: Clock & { ms: number } = { ms: 1_000, nowMs: () => this.clock.ms };
  readonly trust: Trust = { endMs: Infinity };
  readonly logger = new MemoryLogger();
  readonly ended: Promise<Outcome>;
  readonly late: Promise<void>;
  readonly runner: Runner;
  readonly token = 'token-under-test';

  constructor(handler: Handler) {
    let end: (outcome: Outcome) => void;
    let endLate: () => void;
    this.ended = new Promise((resolve) => (end = resolve));
    this.late = new Promise((resolve) => (endLate = resolve));
    this.runner = new Runner(
      collect({ sync: every('1s', handler) }),
      this.clock,
      this.trust,
      this.logger,
      {
        ended: (_, outcome) => end(outcome),
        endedLate: () => endLate(),
        confirm: () => Promise.resolve(),
      },
    );
    this.runner.start(makeAssignment('sync', { token: this.token, slot: 5 }));
  }

  cancel(reason: CancelReason, trusted = true): void {
    this.runner.cancel(this.token, reason, '', trusted);
  }
}

const outcomeOf = (handler: Handler) => new Stage(handler).ended;

async function resultOf(handler: Handler): Promise<string> {
  const { result } = await outcomeOf(handler);
  assert.equal(result.case, 'success', JSON.stringify(result.value));
  return result.value.result;
}

async function failureOf(handler: Handler) {
  const { result } = await outcomeOf(handler);
  assert.equal(result.case, 'failure');
  return result.value;
}

const throwing = (error: unknown): Handler => {
  return () => {
    throw error;
  };
};

/** Waits to be told, and then does something. */
const waiting = (then: (ctx: Context) => unknown, told?: () => void): Handler => {
  return async (ctx) => {
    const aborted = new Promise((resolve) => ctx.signal.addEventListener('abort', resolve));
    told?.();
    await aborted;
    return then(ctx);
  };
};

// ── Results ─────────────────────────────────────────────────────────────────────────────────────

test('what a handler returns becomes text', async () => {
  assert.equal(await resultOf(() => undefined), '');
  assert.equal(await resultOf(() => null), '');
  assert.equal(await resultOf(() => 'a text'), 'a text');
  assert.equal(await resultOf(async () => Promise.resolve({ a: ['Ω'] })), '{"a":["Ω"]}');
  assert.equal(await resultOf(() => 3), '3');
  assert.equal(await resultOf(() => 3n), '3n');
  assert.match(await resultOf(() => () => 1), /Function/);
  const cycle: { self?: object } = {};
  cycle.self = cycle;
  assert.match(await resultOf(() => cycle), /Circular/);
});

test('a result is cut to 16 KiB, between characters', async () => {
  assert.equal(await resultOf(() => 'x'.repeat(20_000)), 'x'.repeat(16_384));
  assert.equal(await resultOf(() => '€'.repeat(6_000)), '€'.repeat(5_461));
  assert.equal(await resultOf(() => 'x' + '😀'.repeat(5_000)), 'x' + '😀'.repeat(4_095));
});

test('what a handler throws becomes a failure', async () => {
  class OwnError extends Error {}
  const failure = await failureOf(throwing(new OwnError('no such table')));
  assert.equal(failure.type, 'OwnError');
  assert.equal(failure.message, 'no such table');
  assert.match(failure.stackTrace, /no such table\n +at /);
  assert.equal(failure.permanent, false);
  assert.equal(failure.retryAfter, undefined);
  assert.equal((await failureOf(throwing(new TypeError('x')))).type, 'TypeError');
  const text = await failureOf(throwing('only a text'));
  assert.deepEqual([text.type, text.message, text.stackTrace], ['string', 'only a text', '']);
  const long = await failureOf(throwing(new Error('€'.repeat(9_000))));
  assert.equal(Buffer.byteLength(long.message), 4_095);
  assert.ok(Buffer.byteLength(long.stackTrace) <= 16_384);
});

test('an error that cannot be read is a failure all the same', async () => {
  const error = new Error('x');
  Object.defineProperty(error, 'message', {
    get: () => throwing(new Error('again'))(makeContext()),
  });
  assert.equal((await failureOf(throwing(error))).message, 'its error cannot be read');
});

test('Retry and Permanent say what is to follow, and what is behind them', async () => {
  const again = await failureOf(throwing(new Retry('again', { after: '90s' })));
  assert.deepEqual([again.type, again.message, again.permanent], ['Retry', 'again', false]);
  assert.equal(wireToMs(again.retryAfter), 90_000);
  const cause = new RangeError('too far');
  const never = await failureOf(throwing(new Permanent('', { cause })));
  assert.deepEqual([never.type, never.message, never.permanent], ['RangeError', 'too far', true]);
  assert.match(never.stackTrace, /too far/);
  assert.throws(() => new Retry('', { after: '0s' }), /Retry after '0s': must be more than zero/);
  assert.throws(() => new Retry('', { after: '5' }), JobError);
});

test('what did not succeed is logged, with the attempt and without its token', async () => {
  const stage = new Stage(throwing(new Error('no such table')));
  await stage.ended;
  assert.match(stage.logger.text, /^error: sync 5 attempt 1: failed: Error: no such table\n +at /);
  assert.ok(!stage.logger.text.includes(stage.token));
});

test('elapsed is what the clock says', async () => {
  const stage: Stage = new Stage(() => (stage.clock.ms += 1_234));
  assert.equal(wireToMs((await stage.ended).elapsed), 1_234);
});

// ── Cancellation ────────────────────────────────────────────────────────────────────────────────

test('a handler that obeys is reported as stopped, with the first reason', async () => {
  const ways: ((ctx: Context) => unknown)[] = [
    (ctx) => ctx.check(),
    (ctx) => Promise.reject(ctx.signal.reason as Error),
    (ctx) => ctx.sleep('1h'),
    () => Promise.reject(new DOMException('aborted', 'AbortError')),
    (ctx) => Promise.reject(new Error('wrapped', { cause: ctx.signal.reason })),
  ];
  for (const way of ways) {
    const stage: Stage = new Stage(
      waiting(way, () => {
        stage.cancel(CancelReason.REQUESTED);
        stage.cancel(CancelReason.FENCED, false);
      }),
    );
    const { result } = await stage.ended;
    assert.equal(result.case, 'stopped');
    assert.equal(result.value.reason, CancelReason.REQUESTED);
    assert.equal(stage.logger.text, 'info: sync 5 attempt 1: stopped (requested)');
  }
});

test('one that was told to stop and did something else is reported truthfully', async () => {
  const told = (then: (ctx: Context) => unknown) => {
    const stage: Stage = new Stage(waiting(then, () => stage.cancel(CancelReason.TIMEOUT)));
    return stage.ended;
  };
  assert.equal((await told(() => 'done anyway')).result.case, 'success');
  assert.equal((await told(throwing(new Error('broken')))).result.case, 'failure');
});

test('an abort of its own is no obedience', async () => {
  const { result } = await outcomeOf(throwing(new DOMException('aborted', 'AbortError')));
  assert.equal(result.case, 'failure');
});

test('a stop that nobody asked for is a warning, and an unknown reason keeps its number', async () => {
  const stage: Stage = new Stage(
    waiting(
      (ctx) => ctx.check(),
      () => stage.cancel(77 as CancelReason),
    ),
  );
  const { result } = await stage.ended;
  assert.equal(result.value && 'reason' in result.value && result.value.reason, 77);
  assert.equal(stage.logger.text, 'warn: sync 5 attempt 1: stopped (other)');
});

test('s04 check() looks at the clock itself, and trust that is over stays over', async () => {
  const seen: unknown[] = [];
  const stage: Stage = new Stage((ctx) => {
    stage.trust.endMs = 2_000;
    stage.clock.ms = 1_999;
    seen.push(ctx.cancelled);
    stage.clock.ms = 2_000;
    seen.push(ctx.cancelled, ctx.signal.aborted, ctx.lostSignal.aborted);
    stage.trust.endMs = 9_000;
    ctx.check();
  });
  const { result } = await stage.ended;
  assert.deepEqual(seen, [false, true, true, true]);
  assert.equal(result.case === 'stopped' && result.value.reason, CancelReason.LEASE_LOST);
  assert.match(
    stage.logger.text,
    /^warn: .*stopped \(lease_lost: no keep-alive was answered in time\)/,
  );
});

test('after the client has left, handlers are told so and their results are lost', async () => {
  const stage: Stage = new Stage(
    waiting(
      (ctx) => assert.throws(() => ctx.check(), LeaseLostError),
      () => stage.runner.abandon(),
    ),
  );
  await stage.late;
  assert.equal(stage.runner.isRunning, false);
  assert.match(stage.logger.text, /ended after its client had stopped: its result is lost/);
});

test('what was told to stop before its turn came, or is no longer trusted, never begins', async () => {
  let begun = 0;
  const cancelled = new Stage(() => (begun += 1));
  cancelled.cancel(CancelReason.SUPERSEDED);
  const superseded = (await cancelled.ended).result;
  assert.equal(superseded.case === 'stopped' && superseded.value.reason, CancelReason.SUPERSEDED);
  const held = new Stage(() => (begun += 1));
  held.trust.endMs = held.clock.ms; // another handler had the loop for as long as that
  const lost = (await held.ended).result;
  assert.equal(lost.case === 'stopped' && lost.value.reason, CancelReason.LEASE_LOST);
  const abandoned = new Stage(() => (begun += 1));
  abandoned.runner.abandon();
  await abandoned.late;
  assert.equal(begun, 0);
});

test('handlers of one batch leave the event loop a turn each', async () => {
  const order: string[] = [];
  const { clock, trust, logger } = new Stage(() => undefined);
  let left = 3;
  await new Promise<void>((resolve) => {
    const ended = () => {
      left -= 1;
      if (left === 0) resolve();
    };
    const hooks = { ended, endedLate: ended, confirm: () => Promise.resolve() };
    const jobs = collect({ sync: every('1s', () => order.push('handler')) });
    const runner = new Runner(jobs, clock, trust, logger, hooks);
    for (let n = 0; n < 3; n += 1) runner.start(makeAssignment('sync', {}));
    const turn = () => {
      order.push('turn');
      if (left > 0) setImmediate(turn);
    };
    setImmediate(turn);
  });
  const turns = order.lastIndexOf('handler') - 2;
  assert.ok(turns >= 2, order.join(' '));
});

// ── The context ─────────────────────────────────────────────────────────────────────────────────

test('a context has what the assignment says', () => {
  const ctx = makeContext({
    job: 'sync',
    slot: 1_791_633_610_250,
    attempt: 2,
    fence: 9_007_199_254_740_993n,
    token: 'abc',
    instanceId: 'web-7:42',
    trigger: 'manual',
    payload: 'Ω',
    timeout: '1h',
  });
  assert.deepEqual([ctx.job, ctx.slot, ctx.attempt], ['sync', 1_791_633_610_250, 2]);
  assert.equal(ctx.fence, 9_007_199_254_740_993n);
  assert.deepEqual([ctx.token, ctx.instanceId, ctx.trigger], ['abc', 'web-7:42', 'manual']);
  assert.equal(ctx.payload.toString(), 'Ω');
  assert.equal(ctx.scheduledAt.toISOString(), '2026-10-10T12:00:10.250Z');
  assert.ok(ctx.remainingMs !== undefined && ctx.remainingMs > 3_000_000);
  assert.ok(ctx.deadline && ctx.deadline.getTime() > Date.now() + 3_000_000);
  const bare = makeContext();
  assert.deepEqual(
    [bare.deadline, bare.remainingMs, bare.cancelled],
    [undefined, undefined, false],
  );
});

test('a context is trusted until the test cancels it, and told again when it is lost', () => {
  const ctx = makeContext();
  ctx.check();
  cancel(ctx, 'timeout');
  assert.throws(() => ctx.check(), { name: 'CancelledError', reason: 'timeout' });
  assert.ok(ctx.signal.reason instanceof CancelledError);
  assert.equal(ctx.lostSignal.aborted, false);
  cancel(ctx, 'fenced');
  assert.throws(() => ctx.check(), { name: 'LeaseLostError', reason: 'timeout' });
  assert.equal(ctx.lostSignal.aborted, true);
  const fenced = makeContext();
  cancel(fenced, 'fenced');
  assert.throws(() => fenced.check(), FencedError);
});

test('a context that is logged does not show its token', () => {
  const ctx = makeContext({ token: 'secret-7' });
  assert.equal(inspect(ctx), 'Context { test 1791633610000 attempt 1 }');
  assert.equal(inspect({ deep: [ctx] }).includes('secret-7'), false);
});

test('confirm() checks, asks, and checks again', async () => {
  await makeContext().confirm();
  await assert.rejects(makeContext({ confirmed: false }).confirm(), NotConfirmedError);
  const before = makeContext();
  cancel(before);
  await assert.rejects(before.confirm(), CancelledError);
  const after = makeContext();
  const asked = after.confirm();
  cancel(after, 'lease_lost');
  await assert.rejects(asked, LeaseLostError);
});

test('sleep() waits no longer than until a cancellation, and then checks', async () => {
  const ctx = makeContext();
  await ctx.sleep('1ms');
  const asleep = ctx.sleep('5w');
  cancel(ctx);
  await assert.rejects(asleep, CancelledError);
  await assert.rejects(ctx.sleep('1h'), CancelledError);
  await assert.rejects(makeContext().sleep('5'), /sleep\('5'\): a number needs its unit/);
});

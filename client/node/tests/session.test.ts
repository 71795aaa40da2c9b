/** The session in virtual time: each rule of client/README.md alone. */

import { create, toBinary } from '@bufbuild/protobuf';
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { toWire, wireToMs } from '../src/duration';
import {
  CredentialsError,
  FencedError,
  LeaseLostError,
  NotConfirmedError,
  RefusedError,
  SessionNotFoundError,
  SessionReplacedError,
} from '../src/errors';
import { CancelReason } from '../src/generated/anarchon/v1/run_pb';
import {
  CompleteRequestSchema,
  CompleteResponseSchema,
  ReceiptStatus,
} from '../src/generated/anarchon/v1/session_pb';
import { AWAY, Harness, INTERVAL_MS, stopped, success, TTL_MS, type Of } from './harness';

const { LEASE_LOST, FENCED, REQUESTED, SHUTDOWN, TIMEOUT } = CancelReason;
const NOT_FOUND = new SessionNotFoundError('no such session', 'SESSION_NOT_FOUND');
const CANCEL_GRACE_MS = 5_000;
const FIVE_MINUTES_MS = 300_000;

const cancels = (harness: Harness) =>
  harness.all('cancelHandler').map(({ token, reason, trusted }) => [token, reason, trusted]);
const started = (harness: Harness) =>
  harness.all('startHandler').map(({ assignment }) => assignment.token);

// ── Attaching ───────────────────────────────────────────────────────────────────────────────────

test('subscribes at once with its jobs and nothing in flight', () => {
  const { request } = new Harness().one('openStream');
  assert.deepEqual(
    request.jobs.map((job) => job.name),
    ['sync'],
  );
  assert.equal(request.sessionId, 'session');
  assert.deepEqual(request.inFlight, []);
});

test('a keep-alive follows attached at once, and attached extends no trust', () => {
  const harness = new Harness();
  harness.attach();
  assert.equal(harness.one('sendKeepAlive').timeoutMs, INTERVAL_MS);
  assert.equal(harness.session.trustEndMs, 0);
  harness.none('setTrust');
});

test('s26 a sidecar that came back with shorter leases shortens trust', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.loseStream();
  harness.wait(100);
  harness.attach({ ttlMs: 2_000 });
  assert.equal(harness.one('setTrust').endMs, harness.nowMs + 2_000);
  harness.wait(2_000);
  assert.deepEqual(cancels(harness), [['a', LEASE_LOST, false]]);
});

test('s26 what a sidecar that came back names as lost keeps its reason although trust ends', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b']);
  harness.loseStream();
  harness.wait(100);
  harness.attach({ ttlMs: 0, lost: [{ token: 'a', reason: FENCED }] });
  assert.deepEqual(cancels(harness), [
    ['a', FENCED, false],
    ['b', LEASE_LOST, false],
  ]);
});

test('is ready when the first keep-alive is answered, and only once', () => {
  const harness = new Harness();
  harness.attach();
  harness.none('ready');
  harness.answer(harness.one('sendKeepAlive'));
  assert.equal(harness.one('ready').instanceId, 'one');
  harness.answer(harness.nextKeepAlive());
  harness.none('ready');
});

test('keep-alives go out every interval', () => {
  const harness = Harness.attached();
  for (let n = 0; n < 3; n += 1) {
    harness.wait(INTERVAL_MS - 1);
    harness.none('sendKeepAlive');
    harness.wait(1);
    harness.answer(harness.one('sendKeepAlive'));
  }
});

test('an answer can shorten the interval, to no less than 200 ms', () => {
  const harness = Harness.attached();
  harness.answer(harness.nextKeepAlive(), { intervalMs: 1_000 });
  harness.wait(1_000);
  const sent = harness.one('sendKeepAlive');
  assert.equal(sent.timeoutMs, 1_000);
  harness.answer(sent, { intervalMs: 0 });
  harness.wait(199);
  harness.none('sendKeepAlive');
  harness.wait(1);
  harness.one('sendKeepAlive');
});

test('an answer with a longer interval postpones nothing; a new one counts from the sending', () => {
  const harness = Harness.attached();
  harness.answer(harness.nextKeepAlive(), { intervalMs: 60_000 });
  const sent = harness.nextKeepAlive();
  harness.wait(300);
  harness.answer(sent, { intervalMs: 1_000 });
  harness.wait(700);
  harness.one('sendKeepAlive');
});

test('notes are told', () => {
  const harness = new Harness();
  harness.event({ case: 'attached', value: { notes: ['the schedule is odd'] } });
  assert.ok(harness.all('log').some(({ message }) => message === 'the schedule is odd'));
});

test('a keep-alive that is sent an interval late is told', () => {
  const harness = Harness.attached();
  harness.nowMs += 2 * INTERVAL_MS - 1;
  harness.tick();
  harness.none('log');
  harness.nowMs += 2 * INTERVAL_MS;
  harness.tick();
  assert.match(harness.one('log').message, /no keep-alive was sent for at least 5.0 s/);
});

// ── Trust ───────────────────────────────────────────────────────────────────────────────────────

test('trust counts from the sending of the answered keep-alive', () => {
  const harness = new Harness();
  harness.attach();
  const sent = harness.one('sendKeepAlive');
  const sentAtMs = harness.nowMs;
  harness.nowMs += 4_000;
  harness.answer(sent);
  assert.equal(harness.one('setTrust').endMs, sentAtMs + TTL_MS);
});

test('s16 handlers are cancelled when trust ends', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b']);
  harness.wait(harness.session.trustEndMs - harness.nowMs - 1);
  harness.none('cancelHandler');
  harness.wait(1);
  assert.deepEqual(cancels(harness), [
    ['a', LEASE_LOST, false],
    ['b', LEASE_LOST, false],
  ]);
});

test('an unanswered keep-alive extends nothing', () => {
  const harness = Harness.attached();
  const endMs = harness.session.trustEndMs;
  harness.fail(harness.nextKeepAlive());
  assert.equal(harness.session.trustEndMs, endMs);
});

test('a ttl that shrinks shrinks trust, to nothing too', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.answer(harness.nextKeepAlive(), { ttlMs: 6_000 });
  assert.equal(harness.one('setTrust').endMs, harness.nowMs + 6_000);
  harness.answer(harness.nextKeepAlive(), { ttlMs: 0 });
  assert.deepEqual(cancels(harness), [['a', LEASE_LOST, false]]);
});

test('an answer that comes late does not replace a newer one', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  const old = harness.nextKeepAlive();
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 1 });
  harness.answer(harness.one('sendKeepAlive'), { confirmed: ['a'] });
  const endMs = harness.session.trustEndMs;
  harness.answer(old, { ttlMs: 1 });
  assert.equal(harness.session.trustEndMs, endMs);
});

test('s25 a frozen client first ends trust, and then hears what waited', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  const sent = harness.nextKeepAlive();
  harness.nowMs += 60_000; // nothing ran meanwhile; then an answer from before is read
  harness.answer(sent);
  assert.deepEqual(cancels(harness), [['a', LEASE_LOST, false]]);
});

test('s04 trust that lapsed unseen is over although an answer brings it back', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.fail(harness.nextKeepAlive());
  harness.fail(harness.nextKeepAlive());
  harness.wait(INTERVAL_MS - 1);
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 1 });
  const sent = harness.one('sendKeepAlive');
  harness.nowMs += 10_000; // frozen, over the end of trust
  harness.answer(sent, { confirmed: ['a'] });
  assert.ok(harness.session.trustEndMs > harness.nowMs);
  assert.deepEqual(cancels(harness), [['a', LEASE_LOST, false]]);
  assert.ok(harness.one('answerConfirm').error instanceof LeaseLostError);
  // Still counted from the loss.
  assert.equal(harness.session.exitAtMs, harness.nowMs + INTERVAL_MS);
});

test('the exit time is one interval after the end of trust, while something runs', () => {
  const harness = Harness.attached();
  const endMs = harness.session.trustEndMs;
  assert.equal(harness.session.exitAtMs, undefined);
  harness.assign(['a']);
  assert.equal(harness.session.exitAtMs, endMs + INTERVAL_MS);
  harness.end('a');
  assert.equal(harness.session.exitAtMs, undefined);
});

// ── Assignments ─────────────────────────────────────────────────────────────────────────────────

test('an assignment starts its handler, and is named from then on', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  assert.deepEqual(started(harness), ['a']);
  assert.deepEqual(harness.nextKeepAlive().request.inFlight, ['a']);
});

test('an assignment before the first answer waits for it', () => {
  const harness = new Harness();
  harness.attach();
  const sent = harness.one('sendKeepAlive');
  harness.assign(['a']);
  harness.none('startHandler');
  assert.deepEqual(harness.session.inFlight, []);
  harness.answer(sent);
  assert.deepEqual(started(harness), ['a']);
});

test('an assignment that waits is dropped where a keep-alive fails, and may come again', () => {
  const harness = new Harness();
  harness.attach();
  const sent = harness.one('sendKeepAlive');
  harness.assign(['a']);
  harness.fail(sent);
  harness.answer(harness.nextKeepAlive());
  harness.none('startHandler');
  harness.assign(['a']);
  assert.deepEqual(started(harness), ['a']);
});

test('runs that come before attached are not heard, and nothing starts at the very end of trust', () => {
  const harness = new Harness();
  harness.assign(['a']);
  harness.attachAndTrust();
  harness.none('startHandler');
  harness.nowMs = harness.session.trustEndMs;
  harness.assign(['b']);
  harness.none('startHandler');
});

test('what was cancelled before it started does not start when it comes again', () => {
  const harness = new Harness();
  harness.attach();
  const sent = harness.one('sendKeepAlive');
  harness.assign(['a']);
  harness.cancel('a', REQUESTED);
  harness.receive(harness.one('sendResults'));
  harness.answer(sent);
  harness.assign(['a']);
  harness.none('startHandler');
});

test('a duplicate is started once, also when its result has a receipt', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'a']);
  assert.deepEqual(started(harness), ['a']);
  harness.assign(['a']);
  harness.none('startHandler');
  harness.end('a');
  const sent = harness.one('sendResults');
  harness.assign(['a']);
  harness.none('startHandler');
  harness.receive(sent);
  harness.assign(['a']);
  harness.none('startHandler');
});

test('tokens are remembered for max_concurrency and 1,024 more', () => {
  const harness = Harness.attached({ maxConcurrency: 1 });
  const run = (token: string) => {
    harness.assign([token]);
    if (harness.all('startHandler').length === 0) return false;
    harness.end(token);
    harness.receive(harness.one('sendResults'));
    return true;
  };
  for (let n = 0; n < 1_025; n += 1) assert.ok(run(`t${n}`));
  assert.ok(!run('t0'));
  assert.ok(run('one more'));
  assert.ok(run('t0'));
  assert.ok(!run('t2'));
});

test('a client that is full leaves an assignment unaccepted', () => {
  const harness = Harness.attached({ maxConcurrency: 1 });
  harness.assign(['a', 'b']);
  assert.deepEqual(started(harness), ['a']);
  assert.deepEqual(harness.session.inFlight, ['a']);
  harness.end('a');
  harness.none('startHandler');
  harness.assign(['b']); // sent again
  assert.deepEqual(started(harness), ['b']);
});

test('a run of an unknown job is not accepted', () => {
  const harness = Harness.attached();
  harness.assign(['a'], { job: 'other' });
  assert.equal(harness.one('log').level, 'error');
  assert.deepEqual(harness.session.inFlight, []);
});

// ── Cancellation ────────────────────────────────────────────────────────────────────────────────

test('a cancellation reaches the handler, which runs until it obeys', () => {
  for (const [reason, trusted] of [
    [REQUESTED, true],
    [TIMEOUT, true],
    [99 as CancelReason, true],
    [FENCED, false],
    [LEASE_LOST, false],
  ] as const) {
    const harness = Harness.attached();
    harness.assign(['a']);
    harness.cancel('a', reason);
    assert.deepEqual(cancels(harness), [['a', reason, trusted]]);
    assert.deepEqual(harness.session.inFlight, ['a']);
  }
});

test('a second cancellation is no news unless it ends trust', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.cancel('a', REQUESTED);
  harness.cancel('a', SHUTDOWN);
  assert.deepEqual(harness.commands, []);
  harness.cancel('a', FENCED);
  assert.deepEqual(cancels(harness), [['a', FENCED, false]]);
  harness.cancel('a', LEASE_LOST);
  assert.deepEqual(harness.commands, []);
});

test('a cancellation of what has ended means nothing', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.end('a');
  harness.cancel('a', REQUESTED);
  assert.deepEqual(harness.commands, []);
});

test('what is cancelled before it started is reported as stopped, after no time', () => {
  const harness = new Harness();
  harness.attach();
  harness.assign(['a']);
  harness.cancel('a', REQUESTED);
  const [result] = harness.one('sendResults').request.results;
  assert.deepEqual(result?.outcome?.result, stopped(REQUESTED).result);
  assert.ok(result.outcome.elapsed);
  assert.equal(wireToMs(result.outcome.elapsed), 0);
  harness.none('startHandler');
});

test('s17 what an answer names as lost is cancelled as no longer ours', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b']);
  harness.answer(harness.nextKeepAlive(), { lost: [{ token: 'a', reason: FENCED }] });
  assert.deepEqual(cancels(harness), [['a', FENCED, false]]);
  harness.answer(harness.nextKeepAlive(), { lost: [{ token: 'b' }] });
  assert.deepEqual(cancels(harness), [['b', LEASE_LOST, false]]);
});

// ── Results ─────────────────────────────────────────────────────────────────────────────────────

test('a result is sent at once, and named until its receipt', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.end('a');
  const sent = harness.one('sendResults');
  assert.equal(sent.timeoutMs, 10_000);
  assert.deepEqual(sent.tokens, ['a']);
  assert.deepEqual(sent.request.results[0]?.outcome, success());
  assert.deepEqual(harness.session.inFlight, ['a']);
  harness.receive(sent);
  assert.deepEqual(harness.session.inFlight, []);
});

test('s14 results that end while a call is under way go together', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b', 'c']);
  harness.end('a');
  const first = harness.one('sendResults');
  harness.end('b');
  harness.end('c');
  harness.none('sendResults');
  harness.receive(first);
  assert.deepEqual(harness.one('sendResults').tokens, ['b', 'c']);
});

test('a result without a receipt is repeated with back-off', () => {
  const ways: ((harness: Harness, sent: Of<'sendResults'>) => void)[] = [
    (harness, sent) => harness.failResults(sent),
    (harness, sent) => harness.receive(sent, ReceiptStatus.STORE_UNAVAILABLE),
    (harness, sent) => harness.receive(sent, 99 as ReceiptStatus),
  ];
  for (const way of ways) {
    const harness = Harness.attached();
    harness.assign(['a']);
    harness.end('a');
    const pausesMs: number[] = [];
    for (let n = 0; n < 8; n += 1) {
      const beforeMs = harness.nowMs;
      way(harness, harness.one('sendResults'));
      while (harness.all('sendResults').length === 0) harness.wait(50);
      pausesMs.push(harness.nowMs - beforeMs);
    }
    assert.deepEqual(pausesMs, [50, 100, 200, 400, 800, 1_600, 2_500, 2_500]);
  }
});

test('a result is repeated while its lease can last, for 5 to 60 minutes', () => {
  for (const [leaseMin, givenUpAfterMin] of [
    [undefined, 5],
    [1, 5],
    [6, 6],
    [60, 60],
    [61, 60],
    [-1, 5],
  ] as const) {
    const harness = Harness.attached();
    harness.assign(['a'], leaseMin === undefined ? {} : { leaseMs: leaseMin * 60_000 });
    harness.end('a');
    harness.failResults(harness.one('sendResults'));
    harness.nowMs += givenUpAfterMin * 60_000 - 1;
    harness.tick();
    const sent = harness.one('sendResults');
    harness.wait(1);
    assert.deepEqual(harness.session.inFlight, []);
    const { level, message } = harness.all('log').at(-1) ?? {};
    assert.equal(level, 'error');
    assert.match(message ?? '', new RegExp(`sync 1 attempt 1 .* ${givenUpAfterMin} min, and is`));
    harness.receive(sent); // an answer after that means nothing
    harness.none('sendResults');
  }
});

test('results are given up each in its time, whatever ended first', () => {
  for (const order of [
    ['hour', 'short'],
    ['short', 'hour'],
  ]) {
    const harness = Harness.attached();
    harness.assign(['hour'], { leaseMs: 3_600_000 });
    harness.assign(['received', 'short'], { leaseMs: 30_000 });
    harness.end('received');
    const sent = harness.one('sendResults');
    const giveUpAtMs: Record<string, number> = {};
    for (const token of order) {
      harness.nowMs += 1_000;
      harness.end(token);
      giveUpAtMs[token] = harness.nowMs + (token === 'hour' ? 3_600_000 : FIVE_MINUTES_MS);
    }
    harness.receive(sent); // and what is sent from here on is not answered any more
    for (const [token, left] of [
      ['short', ['hour']],
      ['hour', []],
    ] as const) {
      harness.wait((giveUpAtMs[token] ?? 0) - 1 - harness.nowMs);
      assert.ok(harness.session.inFlight.includes(token));
      harness.wait(1);
      assert.deepEqual(harness.session.inFlight, left);
    }
  }
});

test('a result that does not count is told, and not repeated', () => {
  for (const [status, why] of [
    [ReceiptStatus.FENCED, 'its attempt no longer held the lease'],
    [ReceiptStatus.UNKNOWN_TOKEN, 'the sidecar knows no such attempt'],
    [ReceiptStatus.ALREADY_COMPLETED, 'another outcome is in the store'],
  ] as const) {
    const harness = Harness.attached();
    harness.assign(['a']);
    harness.end('a');
    harness.receive(harness.one('sendResults'), status);
    assert.equal(harness.one('log').level, 'warn');
    assert.ok(harness.one('log').message.endsWith(` did not count: ${why}`));
    assert.deepEqual(harness.session.inFlight, []);
  }
});

test('a result that is refused spoils no other', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b', 'c']);
  harness.end('a');
  const first = harness.one('sendResults');
  harness.end('b');
  harness.end('c');
  harness.receive(first);
  harness.failResults(harness.one('sendResults'), new RefusedError('b is bad'));
  const alone = harness.one('sendResults');
  assert.deepEqual(alone.tokens, ['b']);
  harness.failResults(alone, new RefusedError('b is bad'));
  assert.match(harness.one('log').message, /b is bad/);
  assert.deepEqual(harness.one('sendResults').tokens, ['c']);
});

test('what was refused with others joins none, and none joins it', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b', 'c', 'd']);
  harness.end('c');
  const first = harness.one('sendResults');
  harness.end('a');
  harness.end('b');
  harness.failResults(first);
  const both = harness.one('sendResults');
  assert.deepEqual(both.tokens, ['a', 'b']);
  harness.wait(50); // c is due again
  harness.failResults(both, new RefusedError('b is bad'));
  const other = harness.one('sendResults');
  assert.deepEqual(other.tokens, ['c']);
  harness.receive(other);
  const alone = harness.one('sendResults');
  assert.deepEqual(alone.tokens, ['a']);
  harness.end('d');
  harness.failResults(alone);
  assert.deepEqual(harness.one('sendResults').tokens, ['b']);
});

test('a result without a receipt of its own has none', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.end('a');
  const { tokens } = harness.one('sendResults');
  harness.feed({ kind: 'resultsAnswered', tokens, response: create(CompleteResponseSchema) });
  assert.deepEqual(harness.session.inFlight, ['a']);
});

test('a batch of results ends at 1,000 and at 2 MiB', () => {
  const harness = Harness.attached({ maxConcurrency: 3_000 });
  const tokens = Array.from({ length: 2_000 }, (_, n) => `t${n}`);
  harness.assign(['first', ...tokens]);
  harness.end('first');
  const first = harness.one('sendResults');
  tokens.forEach((token) => harness.end(token));
  harness.receive(first);
  const small = harness.one('sendResults');
  assert.equal(small.tokens.length, 1_000);
  const big = Array.from({ length: 200 }, (_, n) => `big${n}`);
  harness.assign(big);
  big.forEach((token) => harness.end(token, success('x'.repeat(16_384))));
  harness.receive(small);
  harness.receive(harness.one('sendResults'));
  const { request } = harness.one('sendResults');
  assert.ok(request.results.length > 100 && request.results.length < 130);
  assert.ok(toBinary(CompleteRequestSchema, request).length <= 2 * 1024 * 1024);
});

test('a result goes out although there is no stream', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.loseStream();
  harness.end('a');
  assert.deepEqual(harness.one('sendResults').tokens, ['a']);
});

// ── Losing the stream, the session, the sidecar ─────────────────────────────────────────────────

test('s24 a lost stream is opened again with what is in flight', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b']);
  harness.end('b');
  harness.loseStream();
  harness.none('cancelHandler');
  harness.wait(100);
  assert.deepEqual(harness.one('openStream').request.inFlight, ['a', 'b']);
  harness.attach();
  assert.deepEqual(harness.one('sendKeepAlive').request.inFlight, ['a', 'b']);
});

test('s24 keep-alives go on without a stream, and extend no trust', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.loseStream();
  const endMs = harness.session.trustEndMs;
  harness.wait(INTERVAL_MS);
  harness.answer(harness.one('sendKeepAlive'), { streamOpen: false });
  assert.equal(harness.session.trustEndMs, endMs);
  harness.attachAndTrust();
  assert.ok(harness.session.trustEndMs > endMs);
});

test('s26 an answer that comes after its stream was lost extends no trust', () => {
  for (const attachedAgain of [false, true]) {
    const harness = Harness.attached();
    const endMs = harness.session.trustEndMs;
    const sent = harness.nextKeepAlive();
    harness.loseStream();
    harness.wait(100);
    if (attachedAgain) harness.attach();
    harness.answer(sent);
    assert.equal(harness.session.trustEndMs, endMs);
  }
});

test('s26 an answer to a keep-alive from before attached extends no trust', () => {
  const harness = Harness.attached();
  harness.loseStream();
  harness.wait(100);
  const endMs = harness.session.trustEndMs;
  const sent = harness.nextKeepAlive();
  harness.attach();
  harness.answer(sent);
  assert.equal(harness.session.trustEndMs, endMs);
});

test('a sidecar that has lost our stream extends no trust, and is subscribed to again', () => {
  const harness = Harness.attached();
  const endMs = harness.session.trustEndMs;
  harness.answer(harness.nextKeepAlive(), { streamOpen: false });
  assert.equal(harness.session.trustEndMs, endMs);
  harness.one('endStream');
  harness.wait(100);
  harness.one('openStream');
});

test('a ttl that shrinks shortens trust although there is no stream', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.loseStream();
  harness.answer(harness.nextKeepAlive(), { ttlMs: 1_000, streamOpen: false });
  assert.equal(harness.session.trustEndMs, harness.nowMs + 1_000);
});

test('s26 a sidecar gone for good ends trust from the last answer', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  const sentAtMs = harness.nowMs;
  harness.loseStream();
  while (harness.all('cancelHandler').length === 0) {
    harness.wait(10);
    const { commands } = harness;
    for (const command of commands) {
      if (command.kind === 'sendKeepAlive') harness.fail(command);
      if (command.kind === 'openStream') harness.loseStream();
    }
    harness.commands = commands;
  }
  assert.equal(harness.nowMs, sentAtMs + TTL_MS);
});

test('subscribing again backs off from 100 ms to 5 s, drawn from the upper half', () => {
  for (const spread of [0, 0.999]) {
    const harness = new Harness({ spread });
    for (const longestMs of [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]) {
      harness.loseStream();
      const beforeMs = harness.nowMs;
      while (harness.all('openStream').length === 0) harness.wait(1);
      const expectedMs = longestMs * (0.5 + spread / 2);
      assert.ok(Math.abs(harness.nowMs - beforeMs - expectedMs) <= 1, `${longestMs}`);
    }
  }
});

test('the back-off begins anew once a keep-alive was answered, and not before', () => {
  const harness = new Harness();
  for (let n = 0; n < 6; n += 1) {
    harness.attach();
    harness.loseStream();
    harness.wait(5_000);
  }
  harness.loseStream();
  harness.wait(2_400);
  harness.none('openStream');
  harness.wait(100);
  harness.attachAndTrust();
  harness.loseStream();
  harness.wait(50);
  harness.one('openStream');
});

test('a missing sidecar is told once, and its return once', () => {
  const harness = new Harness();
  const told: string[] = [];
  for (let n = 0; n < 5; n += 1) {
    harness.loseStream();
    told.push(...harness.all('log').map(({ level }) => level));
    harness.wait(5_000);
  }
  assert.deepEqual(told, ['warn']);
  harness.attach();
  assert.match(harness.one('log').message, /attached again/);
});

test('SESSION_NOT_FOUND subscribes again, and trust goes on', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  const endMs = harness.session.trustEndMs;
  harness.fail(harness.nextKeepAlive(), NOT_FOUND);
  harness.one('endStream');
  harness.wait(100);
  assert.deepEqual(harness.one('openStream').request.inFlight, ['a']);
  assert.equal(harness.session.trustEndMs, endMs);
  harness.wait(1_000);
  harness.none('sendKeepAlive'); // before the session is there again
});

test('an answer about an older stream opens no other', () => {
  const harness = Harness.attached();
  const sent = harness.nextKeepAlive();
  harness.loseStream();
  harness.wait(100);
  harness.attach();
  harness.answer(sent, { streamOpen: false });
  harness.none('endStream');
  harness.wait(1_000);
  harness.none('openStream');
});

test('an unknown session of an older stream is no news, but what its answer names as lost is', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  const older = harness.nextKeepAlive();
  const late = harness.nextKeepAlive();
  harness.loseStream();
  harness.wait(50);
  harness.attachAndTrust();
  harness.fail(older, NOT_FOUND);
  harness.none('endStream');
  assert.equal(harness.session.state, 'attached');
  harness.answer(late, { lost: [{ token: 'a', reason: FENCED }] });
  assert.deepEqual(cancels(harness), [['a', FENCED, false]]);
});

test('events of an older stream are not heard', () => {
  const harness = Harness.attached();
  const old = harness.stream;
  harness.loseStream();
  harness.wait(100);
  const current = harness.stream;
  harness.stream = old;
  harness.assign(['a']);
  harness.loseStream();
  harness.stream = current;
  harness.attachAndTrust();
  harness.none('startHandler');
});

test('a drain is told, and running handlers go on', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.event({ case: 'drain', value: { grace: toWire(20_000) } });
  assert.equal(harness.one('log').level, 'info');
  harness.answer(harness.nextKeepAlive());
  harness.none('cancelHandler');
});

test('an event of a later version is ignored', () => {
  const harness = Harness.attached();
  harness.event({ case: undefined });
  assert.deepEqual(harness.commands, []);
});

// ── Errors that end the session ─────────────────────────────────────────────────────────────────

test('a refused subscribe ends the session with the server’s words', () => {
  for (const error of [new RefusedError('bad job'), new CredentialsError('no token')]) {
    const harness = new Harness();
    harness.loseStream(error);
    assert.equal(harness.one('closed').error, error);
    harness.none('sendClose'); // there is no session to close
    assert.equal(harness.session.wakeAtMs, undefined);
  }
});

test('a call token that goes stale later is no reason to give up', () => {
  const harness = Harness.attached();
  harness.loseStream(new CredentialsError('no token'));
  harness.none('closed');
  harness.wait(100);
  harness.one('openStream');
});

test('a replaced session stops its handlers, and leaves the session alone', () => {
  const harness = Harness.attached();
  const error = new SessionReplacedError('another stream', 'SESSION_REPLACED');
  harness.assign(['a']);
  harness.loseStream(error);
  assert.deepEqual(cancels(harness), [['a', SHUTDOWN, true]]);
  harness.end('a', stopped(SHUTDOWN));
  harness.receive(harness.one('sendResults'));
  assert.equal(harness.one('closed').error, error);
  harness.none('sendClose');
});

test('a refused keep-alive stops handlers, reports and closes', () => {
  const harness = Harness.attached();
  const error = new RefusedError('too far apart', 'VERSION');
  harness.assign(['a']);
  const sent = [harness.nextKeepAlive(), harness.nextKeepAlive()] as const;
  harness.fail(sent[0], error);
  assert.deepEqual(cancels(harness), [['a', SHUTDOWN, true]]);
  harness.none('sendKeepAlive');
  harness.fail(sent[1], new RefusedError('the first one stays'));
  harness.loseStream();
  harness.wait(100);
  harness.none('openStream');
  harness.end('a', stopped(SHUTDOWN));
  harness.receive(harness.one('sendResults'));
  harness.one('sendClose');
  harness.feed({ kind: 'closeEnded' });
  assert.equal(harness.one('closed').error, error);
});

test('a subscribe over 4 MiB is refused before it is sent', () => {
  const jobs = Array.from({ length: 20_000 }, (_, n) => ({
    name: 'n'.repeat(120) + `${n}`,
    labels: { why: 'x'.repeat(100) },
  }));
  const harness = new Harness({ jobs });
  harness.none('openStream');
  assert.match(harness.one('closed').error?.message ?? '', /at most 4194304 may be sent/);
});

// ── confirm() ───────────────────────────────────────────────────────────────────────────────────

test('confirm sends a keep-alive at once that names the token', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b']);
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 7 });
  const sent = harness.one('sendKeepAlive');
  assert.deepEqual(sent.request.confirm, ['a']);
  assert.deepEqual(sent.request.inFlight, ['a', 'b']);
  harness.answer(sent, { confirmed: ['a'] });
  assert.deepEqual(harness.one('answerConfirm'), {
    kind: 'answerConfirm',
    ticket: 7,
    error: undefined,
  });
});

test('what is neither confirmed nor lost, or got no answer, could not be confirmed', () => {
  for (const answer of [
    (harness: Harness) => harness.answer(harness.one('sendKeepAlive')),
    (harness: Harness) => harness.fail(harness.one('sendKeepAlive'), AWAY),
  ]) {
    const harness = Harness.attached();
    harness.assign(['a']);
    harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 7 });
    answer(harness);
    assert.ok(harness.one('answerConfirm').error instanceof NotConfirmedError);
  }
});

test('what is lost is cancelled, and not confirmed', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 7 });
  const lost = [{ token: 'a', reason: FENCED }];
  harness.answer(harness.one('sendKeepAlive'), { lost, confirmed: ['a'] });
  assert.ok(harness.one('answerConfirm').error instanceof FencedError);
  assert.deepEqual(cancels(harness), [['a', FENCED, false]]);
});

test('questions asked while one is under way go together after it', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b']);
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 1 });
  const first = harness.one('sendKeepAlive');
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 2 });
  harness.feed({ kind: 'confirmAsked', token: 'b', ticket: 3 });
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 4 });
  harness.none('sendKeepAlive');
  harness.answer(first, { confirmed: ['a'] });
  const second = harness.one('sendKeepAlive');
  assert.deepEqual(second.request.confirm, ['a', 'b']);
  harness.answer(second, { confirmed: ['a', 'b'] });
  assert.deepEqual(
    harness.all('answerConfirm').map(({ ticket }) => ticket),
    [2, 3, 4],
  );
});

test('confirm without a sidecar, or of what is lost, is answered at once', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b']);
  harness.cancel('b', FENCED);
  harness.feed({ kind: 'confirmAsked', token: 'b', ticket: 1 });
  assert.ok(harness.one('answerConfirm').error instanceof LeaseLostError);
  harness.none('sendKeepAlive');
  harness.fail(harness.nextKeepAlive(), NOT_FOUND);
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 2 });
  assert.ok(harness.one('answerConfirm').error instanceof NotConfirmedError);
});

// ── Leaving ─────────────────────────────────────────────────────────────────────────────────────

test('s23 leaving says so at once, and lets handlers finish', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.feed({ kind: 'stopAsked', graceMs: 20_000, hint: 'hint' });
  assert.equal(
    harness.one('log').message,
    'stopping: waiting up to 20s for 1 handler (sync); hint',
  );
  const sent = harness.one('sendKeepAlive');
  assert.ok(sent.request.draining);
  harness.answer(sent);
  const next = harness.nextKeepAlive();
  assert.ok(next.request.draining);
  harness.answer(next);
  harness.end('a');
  harness.receive(harness.one('sendResults'));
  assert.deepEqual(harness.one('sendClose').request.stopped, []);
  harness.feed({ kind: 'closeEnded' });
  assert.equal(harness.one('closed').error, undefined);
});

test('leaving with nothing running closes at once; before a sidecar was found it is over', () => {
  const attached = Harness.attached();
  attached.feed({ kind: 'stopAsked', graceMs: 20_000 });
  assert.equal(attached.one('sendClose').timeoutMs, 5_000);
  const alone = new Harness();
  alone.feed({ kind: 'stopAsked', graceMs: 20_000 });
  assert.equal(alone.one('closed').error, undefined);
});

test('s23 after the grace handlers are cancelled and handed over', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.feed({ kind: 'stopAsked', graceMs: 8_000 });
  harness.answer(harness.one('sendKeepAlive'));
  harness.wait(7_999);
  harness.none('cancelHandler');
  harness.answer(harness.one('sendKeepAlive'));
  harness.wait(1);
  assert.deepEqual(cancels(harness), [['a', SHUTDOWN, true]]);
  harness.end('a', stopped(SHUTDOWN));
  assert.deepEqual(harness.one('sendResults').request.results[0]?.outcome, stopped(SHUTDOWN));
});

test('s23 a second request skips the grace, and none lengthens it', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.feed({ kind: 'stopAsked', graceMs: 20_000 });
  harness.feed({ kind: 'stopAsked', graceMs: 60_000 });
  harness.none('cancelHandler');
  harness.feed({ kind: 'stopAsked', graceMs: 0 });
  assert.deepEqual(cancels(harness), [['a', SHUTDOWN, true]]);
  const patient = Harness.attached();
  patient.assign(['a']);
  patient.feed({ kind: 'stopAsked', graceMs: 4_000 });
  patient.feed({ kind: 'stopAsked', graceMs: 60_000 });
  patient.wait(4_000);
  assert.deepEqual(cancels(patient), [['a', SHUTDOWN, true]]);
});

test('what was told to stop keeps its lease for the longest grace of the jobs that run', () => {
  const jobs = [
    { name: 'sync', cancelGrace: toWire(1_000) },
    { name: 'slow', cancelGrace: toWire(9_000) },
  ];
  const harness = Harness.attached({ jobs });
  harness.assign(['a']);
  harness.assign(['b'], { job: 'slow' });
  harness.feed({ kind: 'stopAsked', graceMs: 0 });
  harness.answer(harness.one('sendKeepAlive'));
  harness.wait(5_000);
  harness.answer(harness.one('sendKeepAlive'));
  harness.wait(3_999);
  harness.none('sendClose');
  harness.wait(1);
  harness.one('sendClose');
});

test('a job may have a shorter grace of its own, and no longer one', () => {
  const jobs = [
    { name: 'short', stopGrace: toWire(2_000) },
    { name: 'long', stopGrace: toWire(60_000) },
  ];
  const harness = Harness.attached({ jobs });
  harness.assign(['a'], { job: 'short' });
  harness.assign(['b'], { job: 'long' });
  harness.feed({ kind: 'stopAsked', graceMs: 4_000 });
  harness.answer(harness.one('sendKeepAlive'));
  harness.wait(2_000);
  assert.deepEqual(cancels(harness), [['a', SHUTDOWN, true]]);
  harness.wait(2_000);
  assert.deepEqual(cancels(harness), [['b', SHUTDOWN, true]]);
});

test('a handler that does not stop is left to its lease', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.feed({ kind: 'stopAsked', graceMs: 0 });
  harness.answer(harness.one('sendKeepAlive'));
  harness.wait(CANCEL_GRACE_MS - 1);
  harness.none('sendClose');
  harness.wait(1);
  assert.deepEqual(harness.one('sendClose').request.stopped, []);
  assert.match(harness.one('log').message, /sync 1 attempt 1/);
});

test('what surely stopped without a receipt is named on closing', () => {
  const harness = Harness.attached();
  harness.assign(['a', 'b']);
  harness.feed({ kind: 'stopAsked', graceMs: 0 });
  harness.answer(harness.one('sendKeepAlive'));
  harness.end('a', stopped(SHUTDOWN));
  harness.failResults(harness.one('sendResults'));
  harness.end('b');
  harness.nowMs += CANCEL_GRACE_MS;
  harness.tick();
  assert.deepEqual(harness.one('sendClose').request.stopped, ['a']);
  assert.ok(harness.all('log').some(({ message }) => message.includes('could not be reported')));
});

test('what comes while leaving is not started, and handed over', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.feed({ kind: 'stopAsked', graceMs: 20_000 });
  harness.assign(['b']);
  harness.none('startHandler');
  harness.end('a');
  harness.receive(harness.one('sendResults'));
  assert.deepEqual(harness.one('sendClose').request.stopped, ['b']);
});

test('a client that leaves keeps its session until its handlers have ended', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.feed({ kind: 'stopAsked', graceMs: 20_000 });
  harness.loseStream();
  harness.wait(100);
  assert.deepEqual(harness.one('openStream').request.inFlight, ['a']);
  harness.attach();
  assert.ok(harness.one('sendKeepAlive').request.draining);
});

test('no question is left open at the end, and after it nothing is done any more', () => {
  const harness = Harness.attached();
  harness.assign(['a']);
  harness.feed({ kind: 'confirmAsked', token: 'a', ticket: 1 });
  harness.feed({ kind: 'stopAsked', graceMs: 0 });
  harness.end('a');
  harness.receive(harness.one('sendResults'));
  harness.feed({ kind: 'closeEnded' });
  assert.equal(harness.one('answerConfirm').ticket, 1);
  harness.feed({ kind: 'start' });
  harness.assign(['b']);
  assert.deepEqual(harness.commands, []);
  assert.equal(harness.session.wakeAtMs, undefined);
});

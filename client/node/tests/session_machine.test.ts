/**
 * Whatever a sidecar, a network and handlers do, and in whatever order, the session keeps its word: a
 * session, a model of what it may do, and chance in the place of all others.
 */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { RefusedError, SessionNotFoundError } from '../src/errors';
import { CancelReason } from '../src/generated/anarchon/v1/run_pb';
import { AWAY, Harness, stopped, success, type Of } from './harness';

const MAX_CONCURRENCY = 3;
const CANCEL_GRACE_MS = 5_000;
const HISTORIES = 400;
const STEPS = 60;
const NOT_FOUND = new SessionNotFoundError('unknown', 'SESSION_NOT_FOUND');

/** Mulberry32: chance that can be had again by its seed. */
function chanceOf(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

class World {
  private readonly harness = new Harness({ maxConcurrency: MAX_CONCURRENCY });
  private readonly started = new Set<string>();
  /** By token: whether it was told that its trust is over. */
  private readonly running = new Map<string, boolean>();
  private readonly finished = new Set<string>();
  private readonly keepAlives: { sent: Of<'sendKeepAlive'>; atMs: number; stream: number }[] = [];
  private attachedStream = 0;
  private answered = 0;
  private results: Of<'sendResults'> | undefined;
  private readonly tickets = new Set<number>();
  private asked = 0;
  /** Until when the sidecar has promised to hold what runs. */
  private promisedMs = 0;
  private stopByMs = Infinity;
  private isClosing = false;

  constructor(private readonly chance: () => number) {
    this.tookIn();
  }

  /** One thing happens; then look whether the session has kept its word. */
  step(): void {
    this.pick([
      () => this.timePasses(this.below(300)),
      () => this.timePasses(this.below(40_000)),
      () => this.frozen(this.below(100_000)),
      () => this.attached(this.pick([15_000, this.below(20_000)])),
      () => this.streamEnds(),
      () => this.take(() => this.harness.assign([this.token(), this.token(), this.token()])),
      () => this.take(() => this.harness.assign([this.token(), this.token(), this.token()])),
      () => this.take(() => this.harness.cancel(this.token(), 1 + this.below(6))),
      () => this.keepAliveAnswered(),
      () => this.keepAliveAnswered(),
      () => this.keepAliveFails(),
      () => this.handlerEnds(),
      () => this.resultsAnswered(),
      () => this.resultsFail(),
      () => this.handlerAsks(),
      () => this.stops(),
    ])();
    this.holds();
  }

  private below(limit: number): number {
    return Math.floor(this.chance() * limit);
  }

  private pick<T>(choices: readonly T[]): T {
    return choices[this.below(choices.length)] as T;
  }

  /** Few, so that they repeat; the sidecar repeats them too. */
  private token(): string {
    return `t${this.below(12)}`;
  }

  private get session() {
    return this.harness.session;
  }

  private take(happens: () => void): void {
    happens();
    this.tookIn();
  }

  /** Check every command against the model. */
  private tookIn(): void {
    const { nowMs, commands } = this.harness;
    for (const command of commands) {
      switch (command.kind) {
        case 'startHandler': {
          const { token } = command.assignment;
          assert.ok(!this.started.has(token), 'started twice');
          assert.ok(nowMs < this.session.trustEndMs, 'started without trust');
          assert.equal(this.stopByMs, Infinity, 'started while leaving');
          this.started.add(token);
          this.running.set(token, false);
          break;
        }
        case 'cancelHandler': {
          const told = this.running.get(command.token);
          assert.ok(told !== undefined, 'cancelled what does not run');
          this.running.set(command.token, told || !command.trusted);
          break;
        }
        case 'sendKeepAlive':
          this.namesInFlight(command.request.inFlight);
          this.keepAlives.push({ sent: command, atMs: nowMs, stream: this.attachedStream });
          break;
        case 'openStream':
          this.namesInFlight(command.request.inFlight);
          break;
        case 'endStream':
          this.attachedStream = 0;
          break;
        case 'sendResults':
          assert.ok(!this.results, 'two calls at once');
          assert.ok(!command.tokens.some((token) => this.running.has(token)), 'it still runs');
          this.results = command;
          break;
        case 'setTrust':
          assert.ok(command.endMs <= this.promisedMs, 'trusted for longer than was promised');
          break;
        case 'answerConfirm':
          assert.ok(this.tickets.delete(command.ticket), 'answered twice');
          break;
        case 'sendClose':
          this.isClosing = true;
          break;
        case 'closed':
          assert.equal(this.tickets.size, 0, 'a question without an answer');
          break;
        default:
          break;
      }
    }
    this.harness.commands = [];
  }

  private namesInFlight(tokens: readonly string[]): void {
    for (const token of this.running.keys()) assert.ok(tokens.includes(token), 'not named');
    for (const token of tokens) {
      assert.ok(this.running.has(token) || !this.started.has(token) || this.finished.has(token));
    }
  }

  // ── The world ─────────────────────────────────────────────────────────────────────────────────

  private timePasses(forMs: number): void {
    const untilMs = this.harness.nowMs + forMs;
    for (;;) {
      const { wakeAtMs } = this.session;
      if (wakeAtMs === undefined || wakeAtMs > untilMs) break;
      this.harness.nowMs = wakeAtMs;
      this.take(() => this.harness.tick());
    }
    this.harness.nowMs = untilMs;
  }

  private frozen(forMs: number): void {
    this.harness.nowMs += forMs;
    this.take(() => this.harness.tick());
  }

  private attached(ttlMs: number): void {
    if (this.session.state !== 'subscribing') return;
    this.promisedMs = Math.min(this.promisedMs, this.harness.nowMs + ttlMs);
    this.attachedStream = this.harness.stream;
    this.take(() => this.harness.attach({ ttlMs }));
  }

  private streamEnds(): void {
    if (this.session.state !== 'subscribing' && this.session.state !== 'attached') return;
    const isFatal = this.below(30) === 0; // it would end most histories early
    if (isFatal) {
      this.stopByMs = Math.min(this.stopByMs, this.harness.nowMs + CANCEL_GRACE_MS);
    }
    this.attachedStream = 0;
    const error = isFatal ? new RefusedError('no') : this.pick([AWAY, NOT_FOUND]);
    this.take(() => this.harness.loseStream(error));
  }

  private keepAliveAnswered(): void {
    const [entry] = this.keepAlives.splice(this.below(this.keepAlives.length), 1);
    if (!entry) return;
    const { sent, atMs, stream } = entry;
    const ttlMs = this.pick([15_000, 15_000, this.below(20_000)]);
    const streamOpen = this.below(4) > 0;
    if (sent.number > this.answered) {
      this.answered = sent.number;
      const mayExtend = streamOpen && stream > 0 && stream === this.attachedStream;
      const endMs = atMs + ttlMs;
      this.promisedMs = mayExtend ? endMs : Math.min(this.promisedMs, endMs);
    }
    const lost = this.below(4) === 0 ? [{ token: this.token(), reason: this.below(7) }] : [];
    const confirmed = this.pick([[], sent.request.confirm]);
    this.take(() => this.harness.answer(sent, { ttlMs, streamOpen, lost, confirmed }));
  }

  private keepAliveFails(): void {
    const [entry] = this.keepAlives.splice(this.below(this.keepAlives.length), 1);
    if (entry) this.take(() => this.harness.fail(entry.sent, this.pick([AWAY, NOT_FOUND])));
  }

  private handlerEnds(): void {
    const token = this.pick([...this.running.keys()]) as string | undefined;
    if (token === undefined || this.session.state === 'closed') return;
    this.running.delete(token);
    this.finished.add(token);
    const outcome = this.pick([stopped(CancelReason.SHUTDOWN), success()]);
    this.take(() => this.harness.end(token, outcome));
  }

  private resultsAnswered(): void {
    const sent = this.results;
    if (!sent) return;
    this.results = undefined;
    this.take(() => this.harness.receive(sent, this.pick([1, 1, 1, this.below(7)])));
  }

  private resultsFail(): void {
    const sent = this.results;
    if (!sent) return;
    this.results = undefined;
    const error = this.pick([AWAY, NOT_FOUND, new RefusedError('no')]);
    this.take(() => this.harness.failResults(sent, error));
  }

  private handlerAsks(): void {
    const token = this.pick([...this.running.keys()]) as string | undefined;
    if (token === undefined || this.session.state === 'closed') return;
    this.asked += 1;
    this.tickets.add(this.asked);
    const ticket = this.asked;
    this.take(() => this.harness.feed({ kind: 'confirmAsked', token, ticket }));
  }

  private stops(): void {
    if (this.below(10) > 0) return;
    const graceMs = this.below(30_000);
    this.stopByMs = Math.min(this.stopByMs, this.harness.nowMs + graceMs + CANCEL_GRACE_MS);
    this.take(() => this.harness.feed({ kind: 'stopAsked', graceMs }));
  }

  // ── What holds at any time ────────────────────────────────────────────────────────────────────

  private holds(): void {
    assert.ok(this.running.size <= MAX_CONCURRENCY, 'more handlers than agreed');
    if (this.session.state === 'closed') return;
    assert.equal(this.session.trustEndMs, this.promisedMs, 'trusts as long as was promised');
    this.take(() => this.harness.tick());
    if (this.harness.nowMs >= this.promisedMs) {
      assert.ok([...this.running.values()].every(Boolean), 'trust is over, and one was not told');
    }
    if (this.harness.nowMs >= this.stopByMs) {
      assert.ok(this.isClosing || this.session.wakeAtMs === undefined, 'leaving has no end');
    }
  }
}

test(`the session keeps its word in ${HISTORIES} histories of ${STEPS} steps`, () => {
  for (let seed = 0; seed < HISTORIES; seed += 1) {
    const world = new World(chanceOf(seed));
    try {
      for (let n = 0; n < STEPS; n += 1) world.step();
    } catch (error) {
      throw new Error(`with seed ${seed}`, { cause: error });
    }
  }
});

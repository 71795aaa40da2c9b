/**
 * The session as a state machine without I/O: the client specification in code.
 *
 * `session.handle(nowMs, fact)` takes what has happened and returns what is to be done; `wakeAtMs`
 * says when to call it again with a tick. Time and chance come in as arguments, the messages are the
 * wire's own. Imports the wire's messages, the durations and the errors.
 *
 * A session is detached (no stream), subscribing (one is being opened), attached, or closed. Leaving
 * is a direction, not a state: a session that leaves keeps its stream and its trust for as long as a
 * handler runs.
 */

import { clone, create, toBinary } from '@bufbuild/protobuf';
import { timestampMs } from '@bufbuild/protobuf/wkt';
import { labelOf, NOT_ANSWERED, reasonOf } from './context';
import { formatDuration, wireToMs } from './duration';
import {
  CredentialsError,
  LeaseLostError,
  lostError,
  NotConfirmedError,
  RefusedError,
  SessionNotFoundError,
  SessionReplacedError,
  type AnarchonError,
  type SidecarError,
} from './errors';
import type { JobSpec } from './generated/anarchon/v1/job_pb';
import {
  CancelReason,
  OutcomeSchema,
  StoppedSchema,
  type Outcome,
} from './generated/anarchon/v1/run_pb';
import {
  CloseSessionRequestSchema,
  CompleteRequestSchema,
  KeepAliveRequestSchema,
  ReceiptStatus,
  ResultSchema,
  SubscribeRequestSchema,
  type Assignment,
  type Attached,
  type Cancellation,
  type CloseSessionRequest,
  type CompleteRequest,
  type CompleteResponse,
  type KeepAliveRequest,
  type KeepAliveResponse,
  type SubscribeRequest,
  type SubscribeResponse,
} from './generated/anarchon/v1/session_pb';

export const MESSAGE_MAX_BYTES = 4 * 1024 * 1024;
export const BACKOFF_FIRST_MS = 100;
export const BACKOFF_MAX_MS = 5_000;
/** Whatever a sidecar says, no more keep-alives than this. */
const KEEP_ALIVE_INTERVAL_MIN_MS = 200;
const KEEP_ALIVE_TIMEOUT_MAX_MS = 5_000;
const COMPLETE_TIMEOUT_MS = 10_000;
/** For this long at least; for the lease where it is longer, but not for longer than a lease can be. */
const COMPLETE_FOR_MS = 5 * 60_000;
const COMPLETE_FOR_MAX_MS = 60 * 60_000;
const CLOSE_TIMEOUT_MS = 5_000;
const CANCEL_GRACE_MS = 5_000;
const REMEMBERED_BEYOND_CONCURRENCY = 1_024;
const RESULTS_MAX = 1_000;
const RESULTS_MAX_BYTES = 2 * 1024 * 1024;
const NAMES_SHOWN = 5;
const NOT_KNOWN = 'the sidecar no longer knows our session';

/** What has happened. */
export type Fact =
  /** The client wants the session. */
  | { kind: 'start' }
  /** The time of `wakeAtMs` has come. */
  | { kind: 'tick' }
  /** An event came on a stream. */
  | { kind: 'streamEvent'; stream: number; event: SubscribeResponse }
  /** A stream ended, or could not be opened. */
  | { kind: 'streamEnded'; stream: number; error: SidecarError }
  | { kind: 'keepAliveAnswered'; number: number; response: KeepAliveResponse }
  /** A keep-alive was not answered, or with an error. */
  | { kind: 'keepAliveFailed'; number: number; error: SidecarError }
  /** A handler has returned, thrown or obeyed. */
  | { kind: 'handlerEnded'; token: string; outcome: Outcome }
  /** Results got their receipts, one each, in the order in which they were sent. */
  | { kind: 'resultsAnswered'; tokens: readonly string[]; response: CompleteResponse }
  /** Results got no answer, or an error. */
  | { kind: 'resultsFailed'; tokens: readonly string[]; error: SidecarError }
  /** A handler wants its lease renewed now. `ticket` comes back with the answer. */
  | { kind: 'confirmAsked'; token: string; ticket: number }
  /**
   * The client wants to leave: handlers may go on for `graceMs`. `hint` says to people, where there is
   * something to wait for, how not to.
   */
  | { kind: 'stopAsked'; graceMs: number; hint?: string }
  /** CloseSession was answered, or was not. */
  | { kind: 'closeEnded' };

/** What is to be done, in this order. */
export type Command =
  /** Call Subscribe, and end the stream before. */
  | { kind: 'openStream'; stream: number; request: SubscribeRequest }
  /** End the present stream. */
  | { kind: 'endStream' }
  /** Call KeepAlive; it counts as sent now. */
  | { kind: 'sendKeepAlive'; number: number; request: KeepAliveRequest; timeoutMs: number }
  /** Call Complete. */
  | {
      kind: 'sendResults';
      tokens: readonly string[];
      request: CompleteRequest;
      timeoutMs: number;
    }
  /** Call CloseSession. */
  | { kind: 'sendClose'; request: CloseSessionRequest; timeoutMs: number }
  /** Run this attempt's handler. */
  | { kind: 'startHandler'; assignment: Assignment }
  /** Tell a handler to stop. `trusted`: it may still finish what it is at. */
  | {
      kind: 'cancelHandler';
      token: string;
      reason: CancelReason;
      message: string;
      trusted: boolean;
    }
  /** Trust the session until then. */
  | { kind: 'setTrust'; endMs: number }
  /** Answer a handler's question. No error: the lease was just renewed. */
  | { kind: 'answerConfirm'; ticket: number; error: AnarchonError | undefined }
  /** The session is attached, and its first keep-alive answered. */
  | { kind: 'ready'; instanceId: string }
  /** Tell people. */
  | { kind: 'log'; level: 'info' | 'warn' | 'error'; message: string }
  /** The session is over. */
  | { kind: 'closed'; error: AnarchonError | undefined };

export type State = 'detached' | 'subscribing' | 'attached' | 'closed';

/** An attempt whose handler runs. */
interface Running {
  readonly assignment: Assignment;
  cancelled: boolean;
  lostAtMs: number | undefined;
  lostBecause: CancelReason;
}

/** An attempt whose handler has ended, and whose result has no receipt yet. */
interface Finished {
  readonly outcome: Outcome;
  readonly label: string;
  readonly giveUpAtMs: number;
  readonly repeatForMs: number;
  sendAtMs: number;
  tries: number;
  /** Its batch was refused: it goes alone, so that it spoils no other's. */
  alone: boolean;
}

/** A handler's question for `confirm()`. */
interface Question {
  readonly ticket: number;
  readonly token: string;
}

/** A keep-alive that has not been answered yet. */
interface Unanswered {
  readonly sentAtMs: number;
  /** The stream that was attached when it was sent; 0: none. */
  readonly attachedStream: number;
  readonly questions: readonly Question[];
}

/** One client's attachment to its sidecar. */
export class Session {
  state: State = 'detached';
  /** Until when the sidecar is trusted to have our leases renewed. */
  trustEndMs = 0;

  private commands: Command[] = [];
  private readonly specs: ReadonlyMap<string, JobSpec>;

  private stream = 0;
  private openAtMs: number | undefined;
  private failures = 0;
  private toldLost = false;
  private wasAttached = false;
  private isReady = false;
  private instanceId = '';

  private intervalMs = KEEP_ALIVE_INTERVAL_MIN_MS;
  private keepAliveAtMs: number | undefined;
  private keepAlives = 0;
  /** The newest keep-alive that was answered. */
  private answered = 0;
  private readonly unanswered = new Map<number, Unanswered>();
  private questions: Question[] = [];

  private readonly held = new Map<string, Assignment>();
  private readonly attempts = new Map<string, Running>();
  private readonly finished = new Map<string, Finished>();
  /** None is given up before; later if the one it was taken from got its receipt. */
  private giveUpAtMs = Infinity;
  private isSending = false;
  /** The last tokens started, oldest first. */
  private readonly remembered = new Set<string>();

  private error: AnarchonError | undefined;
  private stopAtMs: number | undefined;
  private graceEndMs = 0;
  private leaveByMs = 0;
  private isClosing = false;

  /** `request` is without what is in flight; `random` draws from [0, 1). */
  constructor(
    private readonly request: SubscribeRequest,
    private readonly random: () => number,
  ) {
    this.specs = new Map(request.jobs.map((spec) => [spec.name, spec]));
  }

  /** Take in what has happened, and return what is to be done. */
  handle(nowMs: number, fact: Fact): Command[] {
    if (this.state === 'closed') return [];
    this.noticeStandstill(nowMs);
    // Before anything else: trust that has ended is not revived by what comes late.
    this.endTrustIfOver(nowMs);
    this.takeIn(nowMs, fact);
    this.advance(nowMs);
    const commands = this.commands;
    this.commands = [];
    return commands;
  }

  /** When to call `handle` with a tick if nothing happens before. */
  get wakeAtMs(): number | undefined {
    if (this.state === 'closed') return undefined;
    const times = [this.openAtMs, this.keepAliveAtMs];
    if (some(this.attempts, (run) => run.lostAtMs === undefined)) times.push(this.trustEndMs);
    if (this.finished.size > 0) {
      times.push(this.giveUpAtMs);
      if (!this.isSending) for (const { sendAtMs } of this.finished.values()) times.push(sendAtMs);
    }
    if (this.isLeaving && !this.isClosing) {
      times.push(this.leaveByMs);
      for (const run of this.attempts.values()) {
        if (!run.cancelled) times.push(this.cancelAtMs(run));
      }
    }
    return earliest(times);
  }

  /** The tokens of every attempt that runs, or has finished without a receipt yet. */
  get inFlight(): string[] {
    return [...this.attempts.keys(), ...this.finished.keys()];
  }

  /** Whether the client wants to leave. */
  get isLeaving(): boolean {
    return this.stopAtMs !== undefined;
  }

  /**
   * When a process that is not to outlive a lost lease must be gone: one keep-alive interval, which is
   * the margin of the session's shortest lease, after the trust of an attempt that still runs.
   * `undefined` while nothing runs.
   */
  get exitAtMs(): number | undefined {
    const ends = [...this.attempts.values()].map((run) => run.lostAtMs ?? this.trustEndMs);
    const endMs = earliest(ends);
    return endMs === undefined ? undefined : endMs + this.intervalMs;
  }

  // ── Facts ─────────────────────────────────────────────────────────────────────────────────────

  private takeIn(nowMs: number, fact: Fact): void {
    switch (fact.kind) {
      case 'start':
        this.openAtMs = nowMs;
        break;
      case 'tick':
        break; // what follows from the time comes after every fact
      case 'streamEvent':
        // Events of a stream that is no longer ours are not heard.
        if (fact.stream === this.stream) this.takeEvent(nowMs, fact.event);
        break;
      case 'streamEnded':
        if (fact.stream === this.stream) this.streamEnded(nowMs, fact.error);
        break;
      case 'keepAliveAnswered':
        this.keepAliveAnswered(nowMs, fact.number, fact.response);
        break;
      case 'keepAliveFailed':
        this.keepAliveFailed(nowMs, fact.number, fact.error);
        break;
      case 'handlerEnded':
        this.handlerEnded(nowMs, fact.token, fact.outcome);
        break;
      case 'resultsAnswered':
        this.resultsAnswered(nowMs, fact.tokens, fact.response);
        break;
      case 'resultsFailed':
        this.resultsFailed(nowMs, fact.tokens, fact.error);
        break;
      case 'confirmAsked':
        this.questions.push({ ticket: fact.ticket, token: fact.token });
        break;
      case 'stopAsked':
        this.stopAsked(nowMs, fact.graceMs, fact.hint ?? '');
        break;
      case 'closeEnded':
        this.close();
        break;
    }
  }

  private takeEvent(nowMs: number, { event }: SubscribeResponse): void {
    switch (event.case) {
      case 'attached':
        this.attached(nowMs, event.value);
        break;
      case 'runs':
        if (this.state === 'attached')
          event.value.assignments.forEach((each) => this.assigned(each));
        break;
      case 'cancel': {
        const { token, reason, message } = event.value;
        const trusted = reason !== CancelReason.LEASE_LOST && reason !== CancelReason.FENCED;
        this.cancel(nowMs, token, reason, message, trusted);
        break;
      }
      case 'drain':
        this.say('info', 'the sidecar is going away: no more runs until it is back');
        break;
      default: // a later version's
        break;
    }
  }

  private attached(nowMs: number, attached: Attached): void {
    this.state = 'attached';
    if (this.toldLost) {
      this.say('info', `attached again, to instance ${attached.instanceId}`);
    } else if (!this.wasAttached) {
      this.say('info', `attached to instance ${attached.instanceId}`);
    }
    this.toldLost = false;
    this.wasAttached = true;
    this.instanceId = attached.instanceId;
    this.setInterval(wireToMs(attached.keepAliveInterval));
    this.takeLost(nowMs, attached.lost);
    attached.notes.forEach((note) => this.say('info', note));
    // It extends no trust, but shortens it: a sidecar that has come back may have shorter leases.
    this.shortenTrust(nowMs + wireToMs(attached.sessionTtl));
    this.endTrustIfOver(nowMs);
    // Nothing is handed out before this.
    this.keepAliveAtMs = nowMs;
  }

  private assigned(assignment: Assignment): void {
    const { token, job } = assignment;
    if (this.attempts.has(token) || this.finished.has(token) || this.remembered.has(token)) {
      return; // delivered again
    }
    if (!this.specs.has(job)) {
      this.say('error', `the sidecar sent a run of '${job}', which we do not have`);
      return;
    }
    // Started by advance(), once there is trust and room.
    this.held.set(token, assignment);
  }

  private streamEnded(nowMs: number, error: SidecarError): void {
    this.state = 'detached';
    this.held.clear();
    if (this.isFatal(error)) this.fail(nowMs, error);
    else this.reopen(nowMs, error instanceof SessionNotFoundError ? NOT_KNOWN : error.message);
  }

  /** Subscribe again after a pause. */
  private reopen(nowMs: number, why: string): void {
    if (this.state === 'subscribing' || this.state === 'attached') this.do({ kind: 'endStream' });
    this.state = 'detached';
    this.held.clear();
    // No event of the old stream counts from here on.
    this.stream += 1;
    if (this.error !== undefined || this.isClosing) return;
    this.openAtMs = nowMs + this.backoffMs(this.failures);
    this.failures += 1;
    if (!this.toldLost && !this.isLeaving) {
      this.toldLost = true;
      this.say('warn', `${why}; subscribing again until that succeeds`);
    }
  }

  private keepAliveAnswered(nowMs: number, number: number, response: KeepAliveResponse): void {
    const sent = this.takeUnanswered(number);
    const isOfThisStream = sent.attachedStream === this.stream && this.state === 'attached';
    if (number > this.answered) {
      this.answered = number;
      this.takePromise(nowMs, sent, response, isOfThisStream);
    }
    this.takeLost(nowMs, response.lost);
    for (const { ticket, token } of sent.questions) {
      this.answerConfirm(ticket, token, response.confirmed.includes(token));
    }
    this.endTrustIfOver(nowMs);
    if (!isOfThisStream) return;
    if (!response.streamOpen) {
      this.reopen(nowMs, 'the sidecar has lost our stream');
      return;
    }
    this.failures = 0;
    if (!this.isReady) {
      this.isReady = true;
      this.do({ kind: 'ready', instanceId: this.instanceId });
    }
  }

  /** What the newest answer promises: trust, and the pace of keep-alives. */
  private takePromise(
    nowMs: number,
    sent: Unanswered,
    response: KeepAliveResponse,
    isOfThisStream: boolean,
  ): void {
    // Counted from the sending: what the sidecar promised, it promised after that.
    const endMs = sent.sentAtMs + wireToMs(response.sessionTtl);
    // Another than the one we are attached to extends nothing: one that was restarted may not even
    // know yet what is in flight, or whether the store still has it as ours.
    if (isOfThisStream && response.streamOpen) this.setTrust(endMs);
    else this.shortenTrust(endMs);
    if (response.keepAliveInterval === undefined) return;
    this.setInterval(wireToMs(response.keepAliveInterval));
    if (this.keepAliveAtMs !== undefined) {
      const dueAtMs = Math.max(nowMs, sent.sentAtMs + this.intervalMs);
      this.keepAliveAtMs = Math.min(this.keepAliveAtMs, dueAtMs);
    }
  }

  private keepAliveFailed(nowMs: number, number: number, error: SidecarError): void {
    const sent = this.takeUnanswered(number);
    this.held.clear();
    for (const { ticket } of sent.questions) {
      const why = new NotConfirmedError(`the sidecar: ${error.message}`);
      this.do({ kind: 'answerConfirm', ticket, error: why });
    }
    if (this.isFatal(error)) {
      this.fail(nowMs, error);
    } else if (error instanceof SessionNotFoundError && sent.attachedStream === this.stream) {
      // Trust goes on to its end: a sidecar that has come back adopts what we name.
      this.keepAliveAtMs = undefined;
      if (this.state === 'attached') this.reopen(nowMs, NOT_KNOWN);
    }
  }

  private takeUnanswered(number: number): Unanswered {
    const sent = this.unanswered.get(number);
    if (sent === undefined) throw new Error(`keep-alive ${number} was not sent, or answered twice`);
    this.unanswered.delete(number);
    return sent;
  }

  private handlerEnded(nowMs: number, token: string, outcome: Outcome): void {
    const run = this.attempts.get(token);
    if (run === undefined) throw new Error('a handler ended that does not run');
    this.attempts.delete(token);
    this.report(nowMs, run.assignment, outcome);
  }

  private resultsAnswered(
    nowMs: number,
    tokens: readonly string[],
    response: CompleteResponse,
  ): void {
    this.isSending = false;
    for (const [index, token] of tokens.entries()) {
      const result = this.finished.get(token);
      if (result === undefined) continue; // given up meanwhile
      const receipt = response.receipts[index];
      const status = receipt?.status ?? ReceiptStatus.UNSPECIFIED;
      const refusal = RECEIPTS_THAT_REFUSE.get(status);
      if (status === ReceiptStatus.RECORDED) {
        this.finished.delete(token);
      } else if (refusal !== undefined) {
        this.finished.delete(token);
        const why = receipt?.message || refusal;
        this.say('warn', `the result of ${result.label} did not count: ${why}`);
      } else {
        this.sendLater(nowMs, result);
      }
    }
  }

  private resultsFailed(nowMs: number, tokens: readonly string[], error: SidecarError): void {
    this.isSending = false;
    for (const token of tokens) {
      const result = this.finished.get(token);
      if (result === undefined) continue; // given up meanwhile
      if (!(error instanceof RefusedError)) {
        this.sendLater(nowMs, result);
      } else if (tokens.length > 1) {
        result.alone = true;
      } else {
        this.finished.delete(token);
        this.say('error', `the result of ${result.label} is refused: ${error.message}`);
      }
    }
  }

  private stopAsked(nowMs: number, graceMs: number, hint: string): void {
    const isNews = !this.isLeaving;
    this.leave(nowMs, graceMs);
    if (isNews) this.sayWhatIsWaitedFor(nowMs, hint);
  }

  private leave(nowMs: number, graceMs: number): void {
    if (this.stopAtMs === undefined) {
      this.stopAtMs = nowMs;
      this.graceEndMs = nowMs + graceMs;
      if (this.keepAliveAtMs !== undefined) this.keepAliveAtMs = nowMs;
    }
    // A second request may shorten the grace, never lengthen it.
    this.graceEndMs = Math.min(this.graceEndMs, nowMs + graceMs);
    const graces = [...this.attempts.values()].map((run) => this.cancelGraceMs(run));
    this.leaveByMs = this.graceEndMs + (graces.length > 0 ? Math.max(...graces) : CANCEL_GRACE_MS);
  }

  /** Give the session up: handlers are stopped, their results still reported. */
  private fail(nowMs: number, error: AnarchonError): void {
    this.error ??= error;
    this.openAtMs = this.keepAliveAtMs = undefined;
    this.leave(nowMs, 0);
  }

  private sayWhatIsWaitedFor(nowMs: number, hint: string): void {
    if (this.attempts.size > 0) {
      const runs = [...this.attempts.values()];
      const leftMs = Math.max(...runs.map((run) => this.cancelAtMs(run))) - nowMs;
      const how = leftMs > 0 ? `waiting up to ${formatDuration(leftMs)} for` : 'cancelling';
      const names = listed([...new Set(runs.map((run) => run.assignment.job))].sort());
      const what = `${counted(runs.length, 'handler')} (${names})${hint && `; ${hint}`}`;
      this.say('info', `stopping: ${how} ${what}`);
    } else if (this.finished.size > 0) {
      const left = formatDuration(this.leaveByMs - nowMs);
      const what = counted(this.finished.size, 'result');
      this.say('info', `stopping: waiting up to ${left} for ${what} to be reported`);
    }
  }

  // ── What follows from the facts and the time ──────────────────────────────────────────────────

  private advance(nowMs: number): void {
    if (this.openAtMs !== undefined && nowMs >= this.openAtMs) this.openStream(nowMs);
    this.startHeld(nowMs);
    this.cancelWhenLeaving(nowMs);
    this.giveUpResults(nowMs);
    this.sendResults(nowMs);
    this.refuseIdleQuestions();
    const isConfirming = some(this.unanswered, (sent) => sent.questions.length > 0);
    const isDue = this.keepAliveAtMs !== undefined && nowMs >= this.keepAliveAtMs;
    if (isDue || (this.questions.length > 0 && !isConfirming)) this.sendKeepAlive(nowMs);
    this.closeWhenLeft(nowMs);
  }

  private openStream(nowMs: number): void {
    this.openAtMs = undefined;
    this.stream += 1;
    const request = clone(SubscribeRequestSchema, this.request);
    request.inFlight = this.inFlight;
    const sizeBytes = toBinary(SubscribeRequestSchema, request).length;
    if (sizeBytes > MESSAGE_MAX_BYTES) {
      this.fail(nowMs, tooLargeError(sizeBytes));
      return;
    }
    this.state = 'subscribing';
    this.do({ kind: 'openStream', stream: this.stream, request });
  }

  private startHeld(nowMs: number): void {
    if (nowMs >= this.trustEndMs || this.isLeaving) return;
    for (const [token, assignment] of this.held) {
      // A handler that ignores a cancellation keeps its place: the sidecar sends it again.
      if (this.attempts.size >= this.request.maxConcurrency) break;
      this.remember(token);
      this.attempts.set(token, {
        assignment,
        cancelled: false,
        lostAtMs: undefined,
        lostBecause: CancelReason.LEASE_LOST,
      });
      this.do({ kind: 'startHandler', assignment });
    }
    this.held.clear();
  }

  private cancelWhenLeaving(nowMs: number): void {
    if (!this.isLeaving) return;
    for (const [token, run] of this.attempts) {
      if (!run.cancelled && nowMs >= this.cancelAtMs(run)) {
        this.cancel(nowMs, token, CancelReason.SHUTDOWN, '', true);
      }
    }
  }

  private giveUpResults(nowMs: number): void {
    if (nowMs < this.giveUpAtMs) return;
    this.giveUpAtMs = Infinity;
    for (const [token, result] of this.finished) {
      if (nowMs < result.giveUpAtMs) {
        this.giveUpAtMs = Math.min(this.giveUpAtMs, result.giveUpAtMs);
        continue;
      }
      this.finished.delete(token);
      const minutes = Math.floor(result.repeatForMs / 60_000);
      this.say(
        'error',
        `the result of ${result.label} could not be reported for ${minutes} min, and is given up`,
      );
    }
  }

  /** Send what has no receipt, one batch at a time: what ends meanwhile goes with the next. */
  private sendResults(nowMs: number): void {
    if (this.isSending) return;
    const request = create(CompleteRequestSchema);
    let sizeBytes = 0;
    for (const [token, finished] of this.finished) {
      const isFirst = request.results.length === 0;
      if (nowMs < finished.sendAtMs || (finished.alone && !isFirst)) continue;
      const result = create(ResultSchema, { token, outcome: finished.outcome });
      // Key and length of a field take less than 16 bytes.
      sizeBytes += toBinary(ResultSchema, result).length + 16;
      if (!isFirst && sizeBytes > RESULTS_MAX_BYTES) break;
      request.results.push(result);
      if (finished.alone || request.results.length === RESULTS_MAX) break;
    }
    if (request.results.length === 0) return;
    this.isSending = true;
    const tokens = request.results.map((result) => result.token);
    this.do({ kind: 'sendResults', tokens, request, timeoutMs: COMPLETE_TIMEOUT_MS });
  }

  /** Answer at once what no keep-alive could. */
  private refuseIdleQuestions(): void {
    this.questions = this.questions.filter(({ ticket, token }) => {
      const error =
        this.lostError(token) ??
        (this.keepAliveAtMs === undefined
          ? new NotConfirmedError('there is no sidecar now')
          : undefined);
      if (error !== undefined) this.do({ kind: 'answerConfirm', ticket, error });
      return error === undefined;
    });
  }

  private sendKeepAlive(nowMs: number): void {
    this.keepAlives += 1;
    const questions = this.questions;
    this.questions = [];
    this.unanswered.set(this.keepAlives, {
      sentAtMs: nowMs,
      attachedStream: this.state === 'attached' ? this.stream : 0,
      questions,
    });
    if (this.keepAliveAtMs !== undefined) this.keepAliveAtMs = nowMs + this.intervalMs;
    const request = create(KeepAliveRequestSchema, {
      sessionId: this.request.sessionId,
      inFlight: this.inFlight,
      draining: this.isLeaving,
      confirm: [...new Set(questions.map(({ token }) => token))],
    });
    const timeoutMs = Math.min(this.intervalMs, KEEP_ALIVE_TIMEOUT_MAX_MS);
    this.do({ kind: 'sendKeepAlive', number: this.keepAlives, request, timeoutMs });
  }

  private closeWhenLeft(nowMs: number): void {
    if (!this.isLeaving || this.isClosing) return;
    if (this.attempts.size + this.finished.size > 0 && nowMs < this.leaveByMs) return;
    if (this.attempts.size > 0) {
      const labels = [...this.attempts.values()].map((run) => labelOf(run.assignment)).join(', ');
      this.say('error', `handlers that did not stop are left to their leases: ${labels}`);
    }
    // What came too late to be started has surely stopped.
    const stopped = [...this.held.keys()];
    for (const [token, finished] of this.finished) {
      if (finished.outcome.result.case === 'stopped') stopped.push(token);
      else this.say('error', `the result of ${finished.label} could not be reported`);
    }
    // A session that another process uses is not ours to close.
    if (!this.wasAttached || this.error instanceof SessionReplacedError) {
      this.close();
      return;
    }
    this.isClosing = true;
    this.openAtMs = this.keepAliveAtMs = undefined;
    const request = create(CloseSessionRequestSchema, {
      sessionId: this.request.sessionId,
      stopped,
    });
    this.do({ kind: 'sendClose', request, timeoutMs: CLOSE_TIMEOUT_MS });
  }

  private close(): void {
    const sent = [...this.unanswered.values()].flatMap((each) => each.questions);
    for (const { ticket } of [...this.questions, ...sent]) {
      const error = new NotConfirmedError('the client has stopped');
      this.do({ kind: 'answerConfirm', ticket, error });
    }
    this.state = 'closed';
    this.do({ kind: 'endStream' });
    this.do({ kind: 'closed', error: this.error });
  }

  // ── Parts ─────────────────────────────────────────────────────────────────────────────────────

  /** Tell people where our own keep-alive is late: what follows is not the sidecar's fault. */
  private noticeStandstill(nowMs: number): void {
    if (this.keepAliveAtMs === undefined) return;
    const lateMs = nowMs - this.keepAliveAtMs;
    if (lateMs >= this.intervalMs) {
      this.say(
        'warn',
        `no keep-alive was sent for at least ${(lateMs / 1_000).toFixed(1)} s: the event loop was ` +
          'blocked, or the process stood still. Handlers that compute for long belong in a worker',
      );
    }
  }

  private setTrust(endMs: number): void {
    this.trustEndMs = endMs;
    this.do({ kind: 'setTrust', endMs });
  }

  private shortenTrust(endMs: number): void {
    if (endMs < this.trustEndMs) this.setTrust(endMs);
  }

  private endTrustIfOver(nowMs: number): void {
    if (nowMs < this.trustEndMs) return;
    for (const [token, run] of this.attempts) {
      if (run.lostAtMs === undefined) {
        this.cancel(nowMs, token, CancelReason.LEASE_LOST, NOT_ANSWERED, false);
      }
    }
  }

  private takeLost(nowMs: number, lost: readonly Cancellation[]): void {
    for (const { token, reason, message } of lost) {
      this.cancel(nowMs, token, reason, message, false);
    }
  }

  private cancel(
    nowMs: number,
    token: string,
    given: CancelReason,
    message: string,
    trusted: boolean,
  ): void {
    const reason = given === CancelReason.UNSPECIFIED ? CancelReason.LEASE_LOST : given;
    const held = this.held.get(token);
    if (held !== undefined) {
      // It surely never starts, and the sidecar may know it.
      this.held.delete(token);
      this.remember(token);
      this.report(nowMs, held, stoppedOutcome(reason));
    }
    const run = this.attempts.get(token);
    if (run === undefined) return; // it has ended
    const isLost = !trusted && run.lostAtMs === undefined;
    const isNews = !run.cancelled || isLost;
    run.cancelled = true;
    if (isLost) {
      run.lostAtMs = nowMs;
      run.lostBecause = reason;
    }
    if (isNews) this.do({ kind: 'cancelHandler', token, reason, message, trusted });
  }

  private report(nowMs: number, assignment: Assignment, outcome: Outcome): void {
    const repeatForMs = repeatFor(assignment);
    const giveUpAtMs = nowMs + repeatForMs;
    this.giveUpAtMs = Math.min(this.giveUpAtMs, giveUpAtMs);
    this.finished.set(assignment.token, {
      outcome,
      label: labelOf(assignment),
      giveUpAtMs,
      repeatForMs,
      sendAtMs: nowMs,
      tries: 0,
      alone: false,
    });
  }

  private sendLater(nowMs: number, result: Finished): void {
    result.sendAtMs = nowMs + this.backoffMs(result.tries);
    result.tries += 1;
  }

  private answerConfirm(ticket: number, token: string, isConfirmed: boolean): void {
    const unknown = new NotConfirmedError('the store could not renew the lease now');
    const error = this.lostError(token) ?? (isConfirmed ? undefined : unknown);
    this.do({ kind: 'answerConfirm', ticket, error });
  }

  /** The error of an attempt that is no longer ours. */
  private lostError(token: string): LeaseLostError | undefined {
    const run = this.attempts.get(token);
    if (run === undefined) return new LeaseLostError('lease_lost', 'the attempt is over');
    return run.lostAtMs === undefined ? undefined : lostError(reasonOf(run.lostBecause));
  }

  /** When a handler that still runs is cancelled because the client leaves. */
  private cancelAtMs(run: Running): number {
    const own = this.specs.get(run.assignment.job)?.stopGrace;
    if (own === undefined) return this.graceEndMs;
    return Math.min(this.graceEndMs, (this.stopAtMs ?? 0) + wireToMs(own));
  }

  private cancelGraceMs(run: Running): number {
    const own = this.specs.get(run.assignment.job)?.cancelGrace;
    return own === undefined ? CANCEL_GRACE_MS : wireToMs(own);
  }

  private isFatal(error: SidecarError): boolean {
    // Call tokens are changed while sessions live: a wrong one is an error of the beginning.
    if (error instanceof CredentialsError && this.wasAttached) return false;
    return error instanceof SessionReplacedError || error instanceof RefusedError;
  }

  private setInterval(intervalMs: number): void {
    this.intervalMs = Math.max(intervalMs, KEEP_ALIVE_INTERVAL_MIN_MS);
  }

  /** Doubling from 100 ms to 5 s, and drawn from the upper half, so that clients spread. */
  private backoffMs(failures: number): number {
    const longestMs = Math.min(BACKOFF_FIRST_MS * 2 ** Math.min(failures, 10), BACKOFF_MAX_MS);
    return Math.round(longestMs * (0.5 + 0.5 * this.random()));
  }

  private remember(token: string): void {
    this.remembered.add(token);
    const [oldest] = this.remembered;
    const room = this.request.maxConcurrency + REMEMBERED_BEYOND_CONCURRENCY;
    if (this.remembered.size > room && oldest !== undefined) this.remembered.delete(oldest);
  }

  private do(command: Command): void {
    this.commands.push(command);
  }

  private say(level: 'info' | 'warn' | 'error', message: string): void {
    this.do({ kind: 'log', level, message });
  }
}

const RECEIPTS_THAT_REFUSE = new Map<ReceiptStatus, string>([
  [ReceiptStatus.FENCED, 'its attempt no longer held the lease'],
  [ReceiptStatus.UNKNOWN_TOKEN, 'the sidecar knows no such attempt'],
  [ReceiptStatus.ALREADY_COMPLETED, 'another outcome is in the store'],
]);

/** The error for a Subscribe request that no sidecar would take. */
export function tooLargeError(sizeBytes: number): RefusedError {
  return new RefusedError(
    `the Subscribe request has ${sizeBytes} bytes, and at most ${MESSAGE_MAX_BYTES} may be sent: ` +
      'shorten labels, or split the jobs between clients',
    'LIMIT_EXCEEDED',
  );
}

/** An outcome of what was never started, or obeyed: it took no time. */
function stoppedOutcome(reason: CancelReason): Outcome {
  const value = create(StoppedSchema, { reason });
  return create(OutcomeSchema, { result: { case: 'stopped', value }, elapsed: {} });
}

/**
 * How long to repeat a result: while the lease can last, the store may still take it.
 *
 * No clock is read. A slot is claimed when it is due, so that from the slot to the lease's end is the
 * lease; for a later attempt it is more, which does no harm.
 */
function repeatFor({ slot, leaseEndTime }: Assignment): number {
  if (leaseEndTime === undefined) return COMPLETE_FOR_MS;
  const leaseMs = timestampMs(leaseEndTime) - Number(slot);
  return Math.min(Math.max(leaseMs, COMPLETE_FOR_MS), COMPLETE_FOR_MAX_MS);
}

function earliest(times: readonly (number | undefined)[]): number | undefined {
  return times.reduce(
    (first, time) => (first === undefined || (time !== undefined && time < first) ? time : first),
    undefined,
  );
}

function some<V>(map: ReadonlyMap<unknown, V>, holds: (value: V) => boolean): boolean {
  for (const value of map.values()) if (holds(value)) return true;
  return false;
}

function counted(number: number, noun: string): string {
  return `${number} ${noun}${number === 1 ? '' : 's'}`;
}

function listed(names: readonly string[]): string {
  const more = names.length - NAMES_SHOWN;
  return names.slice(0, NAMES_SHOWN).join(', ') + (more > 0 ? ` and ${more} more` : '');
}

/**
 * For tests of handlers and of applications: `makeContext`, and `FakeSidecar`, a sidecar's puppet in the
 * same process. Imports the client and the wire's messages; no server, no network.
 */

import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { SystemClock } from './clock';
import { Context, Orders, wireReasonOf } from './context';
import { toWire, type Duration } from './duration';
import {
  asDuration,
  ClientError,
  NotConfirmedError,
  SessionNotFoundError,
  SessionReplacedError,
  show,
  SidecarError,
  SidecarUnavailableError,
  type CancelReason,
} from './errors';
import { Trigger as WireTrigger, type Outcome } from './generated/anarchon/v1/run_pb';
import {
  AssignmentSchema,
  CancellationSchema,
  CloseSessionResponseSchema,
  CompleteResponseSchema,
  KeepAliveResponseSchema,
  ReceiptStatus,
  SubscribeResponseSchema,
  type Assignment,
  type Cancellation,
  type CloseSessionRequest,
  type CloseSessionResponse,
  type CompleteRequest,
  type CompleteResponse,
  type KeepAliveRequest,
  type KeepAliveResponse,
  type Result,
  type SubscribeRequest,
} from './generated/anarchon/v1/session_pb';
import { stderrLogger, type Logger } from './logger';
import type { StreamListener, Transport } from './transport';

/** 2026-10-10T12:00:10Z */
const SLOT = 1_791_633_610_000;

/** What a test may say of an attempt. Everything has a default. */
export interface AttemptOptions {
  /** Default: 1791633610000, which is 2026-10-10T12:00:10Z. */
  slot?: number;
  /** Default: 1. */
  attempt?: number;
  /** Default: a number that grows. */
  fence?: bigint;
  /** Default: `token-1`, `token-2` ... */
  token?: string;
  /** Default: `fake:1`. */
  instanceId?: string;
  /** Default: `schedule`. */
  trigger?: 'schedule' | 'manual' | 'catch_up';
  /** Texts as UTF-8. Default: empty. */
  payload?: Uint8Array | string;
  /** What is left of the attempt's timeout. Default: no limit. */
  timeout?: Duration;
}

// ── One handler ─────────────────────────────────────────────────────────────────────────────────

/** What a test may say of a context. Everything has a default. */
export interface ContextOptions extends AttemptOptions {
  /** The job's name. Default: `test`. */
  job?: string;
  /** Whether `confirm()` succeeds, or throws `NotConfirmedError`. Default: true. */
  confirmed?: boolean;
  /** Where `ctx.log` goes. Default: standard error. */
  logger?: Logger;
}

const ordersOf = new WeakMap<Context, Orders>();

/** A context as a handler is given one, trusted until `cancel` is called on it. */
export function makeContext(options: ContextOptions = {}): Context {
  const { job = 'test', confirmed = true, logger = stderrLogger, ...attempt } = options;
  const clock = new SystemClock();
  const orders = new Orders(clock, { endMs: Infinity });
  const confirm = (): Promise<void> =>
    confirmed
      ? Promise.resolve()
      : Promise.reject(new NotConfirmedError('the test says that it cannot be told now'));
  const context = new Context(makeAssignment(job, attempt), orders, clock, confirm, logger);
  ordersOf.set(context, orders);
  return context;
}

/**
 * Cancel the attempt of a context that `makeContext` made. With the reasons `lease_lost` and `fenced` it
 * is no longer ours as well, and so it may be called a second time.
 */
export function cancel(context: Context, reason: CancelReason = 'requested'): void {
  const orders = ordersOf.get(context);
  if (orders === undefined) throw new ClientError('the context was not made by makeContext');
  const trusted = reason !== 'lease_lost' && reason !== 'fenced';
  orders.cancel(wireReasonOf(reason), 'cancelled by the test', trusted);
}

// ── A sidecar ───────────────────────────────────────────────────────────────────────────────────

/** An attempt that a `FakeSidecar` has handed out. */
export interface FakeRun {
  /** As it was handed out. */
  readonly assignment: Assignment;
  /** Names the attempt. */
  readonly token: string;
  /** How the attempt ended, once the client has reported it. */
  readonly outcome: Promise<Outcome>;
}

/** What `FakeSidecar` takes. */
export interface FakeSidecarOptions {
  /** What it answers to keep-alives. Default: 15 s. */
  sessionTtl?: Duration;
  /** How often the client is to call KeepAlive. Default: 5 s. */
  keepAliveInterval?: Duration;
}

/**
 * A sidecar's puppet: give it to `new AnarchonClient({ transport })` and pull its strings.
 *
 * It hands out what `assign` says, answers every keep-alive and records every result; it keeps what it
 * was sent in `subscribes`, `keepAlives`, `results` and `closes`. One client at a time.
 */
export class FakeSidecar implements Transport {
  /** What it answers to keep-alives; may be changed. */
  sessionTtl: Duration;
  /** How often the client is to call KeepAlive; may be changed. */
  keepAliveInterval: Duration;
  /** Its name. */
  instanceId = 'fake:1';
  /** What it has to say of the jobs. */
  notes: string[] = [];
  /** What it answers to results; may be changed. */
  receipt = ReceiptStatus.RECORDED;
  /** Whether keep-alives get no answer, although it is there. */
  isSilent = false;
  /** Whether its store can renew leases now. */
  canConfirm = true;
  /** What it was sent. */
  readonly subscribes: SubscribeRequest[] = [];
  /** What it was sent. */
  readonly keepAlives: KeepAliveRequest[] = [];
  /** What it was sent. */
  readonly results: Result[] = [];
  /** What it was sent. */
  readonly closes: CloseSessionRequest[] = [];

  private away = false;
  private refusal: SidecarError | undefined;
  private stream: StreamListener | undefined;
  private knowsSession = false;
  private readonly outcomes = new Map<string, (outcome: Outcome) => void>();
  private readonly lost = new Map<string, CancelReason>();
  private waiting: { holds: () => unknown; resolve: () => void }[] = [];

  constructor({ sessionTtl = '15s', keepAliveInterval = '5s' }: FakeSidecarOptions = {}) {
    this.sessionTtl = sessionTtl;
    this.keepAliveInterval = keepAliveInterval;
  }

  // ── Strings to pull ───────────────────────────────────────────────────────────────────────────

  /** Whether it answers at all. */
  get isAway(): boolean {
    return this.away;
  }

  /** Hand out an attempt at a run of `job`. */
  assign(job: string, options: AttemptOptions = {}): FakeRun {
    const assignment = makeAssignment(job, { instanceId: this.instanceId, ...options });
    const { token } = assignment;
    const outcome = new Promise<Outcome>((resolve) => this.outcomes.set(token, resolve));
    const run = { assignment, token, outcome };
    this.deliver(run);
    return run;
  }

  /** Send attempts, for the first time or again, as one batch. */
  deliver(...runs: readonly FakeRun[]): void {
    const assignments = runs.map((run) => run.assignment);
    this.send({ case: 'runs', value: { assignments } });
  }

  /** Ask for an attempt to stop. */
  cancel(run: FakeRun, reason: CancelReason = 'requested'): void {
    this.send({ case: 'cancel', value: { token: run.token, reason: wireReasonOf(reason) } });
  }

  /** Have another instance take the run over: the next answer that can names it as lost. */
  lose(run: FakeRun, reason: CancelReason = 'fenced'): void {
    this.lost.set(run.token, reason);
  }

  /** Announce that the sidecar is going away. */
  drain(grace: Duration = '20s'): void {
    this.send({ case: 'drain', value: { grace: wire(grace) } });
  }

  /** End the stream, as a network would. */
  breakStream(): void {
    this.end(new SidecarUnavailableError('the stream was broken by the test'));
  }

  /** Have another process take the session over. */
  replaceSession(): void {
    this.end(new SessionReplacedError('another stream took over', 'SESSION_REPLACED'));
  }

  /** Forget the session, as a restarted sidecar does; the stream stays open. */
  forgetSession(): void {
    this.knowsSession = false;
  }

  /** Be gone: the stream breaks, and no call is answered until `comeBack`. */
  goAway(): void {
    this.away = true;
    this.knowsSession = false;
    if (this.stream !== undefined) this.breakStream();
  }

  /** Be there again, as a new process that knows no session. */
  comeBack(): void {
    this.away = false;
  }

  /** Answer every Subscribe with `error` from now on; `undefined`: no more. */
  refuse(error: SidecarError | undefined): void {
    this.refusal = error;
  }

  /** Done once `condition` holds; it is looked at whenever the client has called. */
  waitFor(condition: () => unknown): Promise<void> {
    return new Promise((resolve) => {
      this.waiting.push({ holds: condition, resolve });
      this.look();
    });
  }

  // ── What a client calls ───────────────────────────────────────────────────────────────────────

  /** Be a transport: open the stream. */
  subscribe(request: SubscribeRequest, listener: StreamListener): () => void {
    let isOpen = true;
    const stream: StreamListener = {
      event: (event) => {
        if (isOpen) listener.event(event);
      },
      ended: (error) => {
        if (isOpen) listener.ended(error);
        isOpen = false;
      },
    };
    // As over a network, nothing is heard before the caller is done.
    queueMicrotask(() => {
      this.subscribes.push(request);
      const refusal = this.away ? absent() : this.refusal;
      if (refusal === undefined) this.attach(request, stream);
      else stream.ended(refusal);
      this.look();
    });
    return () => {
      isOpen = false;
      if (this.stream === stream) this.stream = undefined;
    };
  }

  /** Be a transport: answer a keep-alive. */
  async keepAlive(request: KeepAliveRequest, timeoutMs: number): Promise<KeepAliveResponse> {
    await this.called(this.keepAlives, [request]);
    if (this.isSilent) {
      await new Promise((resolve) => setTimeout(resolve, timeoutMs).unref());
      throw new SidecarUnavailableError('the keep-alive was not answered in time');
    }
    if (!this.knowsSession) throw new SessionNotFoundError('no such session', 'SESSION_NOT_FOUND');
    return create(KeepAliveResponseSchema, {
      sessionTtl: wire(this.sessionTtl),
      streamOpen: this.stream !== undefined,
      lost: this.lostOf(request.inFlight),
      keepAliveInterval: wire(this.keepAliveInterval),
      confirmed: this.canConfirm ? request.confirm : [],
    });
  }

  /** Be a transport: take results. */
  async complete(request: CompleteRequest): Promise<CompleteResponse> {
    await this.called(this.results, request.results);
    if (this.receipt === ReceiptStatus.RECORDED) {
      // The client has its receipts before the test goes on.
      setImmediate(() => {
        for (const { token, outcome } of request.results) {
          if (outcome !== undefined) this.outcomes.get(token)?.(outcome);
        }
      });
    }
    const receipts = request.results.map(() => ({ status: this.receipt }));
    return create(CompleteResponseSchema, { receipts });
  }

  /** Be a transport: end the session. */
  async closeSession(request: CloseSessionRequest): Promise<CloseSessionResponse> {
    await this.called(this.closes, [request]);
    this.knowsSession = false;
    return create(CloseSessionResponseSchema);
  }

  /** Be a transport: let go. */
  close(): void {
    this.stream = undefined;
  }

  // ── Parts ─────────────────────────────────────────────────────────────────────────────────────

  private attach(request: SubscribeRequest, stream: StreamListener): void {
    this.stream = stream;
    this.knowsSession = true;
    const value = {
      instanceId: this.instanceId,
      keepAliveInterval: wire(this.keepAliveInterval),
      sessionTtl: wire(this.sessionTtl),
      lost: this.lostOf(request.inFlight),
      notes: this.notes,
    };
    stream.event(create(SubscribeResponseSchema, { event: { case: 'attached', value } }));
  }

  private send(event: Exclude<EventInit, undefined>): void {
    this.openStream().event(create(SubscribeResponseSchema, { event }));
  }

  private end(error: SidecarError): void {
    const stream = this.openStream();
    this.stream = undefined;
    stream.ended(error);
  }

  private openStream(): StreamListener {
    if (this.stream !== undefined) return this.stream;
    throw new ClientError('no client is subscribed: wait for its subscription to be ready');
  }

  /** Keep what the client has sent, and answer in a later turn, as a network does. */
  private async called<M>(kept: M[], messages: readonly M[]): Promise<void> {
    await Promise.resolve();
    if (this.away) throw absent();
    kept.push(...messages);
    queueMicrotask(() => this.look());
  }

  private look(): void {
    const done = this.waiting.filter(({ holds }) => holds());
    this.waiting = this.waiting.filter((each) => !done.includes(each));
    done.forEach(({ resolve }) => resolve());
  }

  private lostOf(tokens: readonly string[]): Cancellation[] {
    return [...this.lost]
      .filter(([token]) => tokens.includes(token))
      .map(([token, reason]) =>
        create(CancellationSchema, { token, reason: wireReasonOf(reason) }),
      );
  }
}

type EventInit = MessageInitShape<typeof SubscribeResponseSchema>['event'];

const TRIGGERS = {
  schedule: WireTrigger.SCHEDULE,
  manual: WireTrigger.MANUAL,
  catch_up: WireTrigger.CATCH_UP,
};

let attempts = 0;

/** @internal */
export function makeAssignment(job: string, options: AttemptOptions): Assignment {
  attempts += 1;
  const { payload = '', timeout } = options;
  const assignment = create(AssignmentSchema, {
    token: options.token ?? `token-${attempts}`,
    job,
    slot: BigInt(options.slot ?? SLOT),
    attempt: options.attempt ?? 1,
    fence: options.fence ?? BigInt(attempts),
    trigger: TRIGGERS[options.trigger ?? 'schedule'],
    instanceId: options.instanceId ?? 'fake:1',
    payload: typeof payload === 'string' ? Buffer.from(payload) : payload,
  });
  if (timeout !== undefined) assignment.timeout = wire(timeout);
  return assignment;
}

function wire(duration: Duration) {
  return toWire(asDuration(`duration ${show(duration)}`, duration, ClientError));
}

function absent(): SidecarUnavailableError {
  return new SidecarUnavailableError('no sidecar: the test says so');
}

/**
 * `AnarchonClient` and `Subscription`: they carry out what the session decides, on node's event loop.
 * Imports the rest of the client.
 */

import { create, toBinary } from '@bufbuild/protobuf';
import { randomUUID } from 'node:crypto';
import { inspect } from 'node:util';
import { SystemClock, type Clock } from './clock';
import type { Trust } from './context';
import type { Duration } from './duration';
import {
  AnarchonError,
  asDuration,
  ClientError,
  NotConfirmedError,
  show,
  SidecarError,
} from './errors';
import { ExitTimer } from './exit_timer';
import { SubscribeRequestSchema } from './generated/anarchon/v1/session_pb';
import { collect, type Job, type Jobs } from './jobs';
import { guarded, stderrLogger, type Logger } from './logger';
import { clientInfo } from './process_info';
import { Runner } from './runner';
import { MESSAGE_MAX_BYTES, Session, tooLargeError, type Command, type Fact } from './session';
import {
  CallToken,
  Endpoint,
  GrpcTransport,
  type EndpointOptions,
  type Transport,
} from './transport';

const STOP_GRACE = '20s';
const MAX_CONCURRENCY_DEFAULT = 100;
const MAX_CONCURRENCY_MAX = 10_000;
/**
 * Node's timers do not count the time for which the machine sleeps, so the clock is looked at this
 * often. The timer also keeps the process alive while there is a subscription.
 */
const LOOK_EVERY_MS = 1_000;

/** What `AnarchonClient` takes. Everything has a default. */
export interface ClientOptions extends EndpointOptions {
  /** The most handlers that run at once, 1 to 10,000. Default: 100. */
  maxConcurrency?: number | undefined;
  /** How long handlers may go on when the client stops. Default: 20 s. */
  stopGrace?: Duration | undefined;
  /**
   * `cancel` tells the handler. `exit` also ends the process, with status 1, where the handler has not
   * stopped when the lease ends; where a handler has the event loop for itself, by SIGKILL. Default:
   * `cancel`.
   */
  onLeaseLost?: 'cancel' | 'exit' | undefined;
  /**
   * Whether the sidecar, where it can see this process, takes its end for the end of its handlers, and
   * hands their runs on at once. Not where what they started may outlive it. Default: true.
   */
  watched?: boolean | undefined;
  /** Where to log. Default: standard error. */
  logger?: Logger | undefined;
  /** For tests: in place of gRPC; see `anarchon/testing`. */
  transport?: Transport | undefined;
  /** For tests: in place of the system's clock. */
  clock?: Clock | undefined;
  /** For tests: in place of `Math.random`. */
  random?: (() => number) | undefined;
}

/**
 * An application's side of Anarchon. Nothing is connected before `subscribe` or `run`.
 *
 * ```ts
 * await new AnarchonClient().run({
 *   sync: every('10s', async (ctx) => { ... }),
 * });
 * ```
 */
export class AnarchonClient {
  private readonly endpoint: Endpoint;
  private readonly maxConcurrency: number;
  private readonly stopGraceMs: number;
  private readonly exits: boolean;
  private readonly watched: boolean;
  private readonly logger: Logger;
  private readonly transport: Transport | undefined;
  private readonly clock: Clock;
  private readonly random: () => number;
  private readonly subscriptions = new Set<Subscription>();

  /** Throws `ClientError` for what is set up wrongly. */
  constructor(options: ClientOptions = {}) {
    const { stopGrace = STOP_GRACE, onLeaseLost = 'cancel' } = options;
    this.endpoint = new Endpoint(options);
    this.maxConcurrency = checkConcurrency(options.maxConcurrency ?? MAX_CONCURRENCY_DEFAULT);
    this.stopGraceMs = graceOf('stopGrace', stopGrace);
    if (!['cancel', 'exit'].includes(onLeaseLost)) {
      throw new ClientError(`onLeaseLost ${show(onLeaseLost)}: must be 'cancel' or 'exit'`);
    }
    this.exits = onLeaseLost === 'exit';
    this.watched = options.watched ?? true;
    this.logger = guarded(options.logger ?? stderrLogger);
    this.transport = options.transport;
    this.clock = options.clock ?? new SystemClock();
    this.random = options.random ?? Math.random;
  }

  /**
   * Start running `jobs`, at once, and return the subscription.
   *
   * A sidecar that is not there is no error: it is looked for until there is one. Throws `JobError` for
   * what is wrong with a job, `ClientError` for what is set up wrongly, `RefusedError` for what is too
   * large to be sent. What the sidecar refuses is thrown by the subscription's `ready` and `closed`.
   */
  subscribe(jobs: Jobs): Subscription {
    const collected = collect(jobs);
    this.endpoint.checkSocket();
    new CallToken(this.endpoint.tokenFile, this.logger); // an error of the beginning is thrown here
    const request = create(SubscribeRequestSchema, {
      sessionId: randomUUID(),
      client: clientInfo(this.watched),
      jobs: [...collected.values()].map((job) => job.spec),
      maxConcurrency: this.maxConcurrency,
    });
    const sizeBytes = toBinary(SubscribeRequestSchema, request).length;
    if (sizeBytes > MESSAGE_MAX_BYTES) throw tooLargeError(sizeBytes);
    const driver = new Driver({
      jobs: collected,
      session: new Session(request, this.random),
      transport: this.transport ?? new GrpcTransport(this.endpoint, this.logger),
      clock: this.clock,
      logger: this.logger,
      exitTimer: this.exits ? new ExitTimer(this.clock) : undefined,
    });
    const subscription = new Subscription(driver, request.sessionId, this.stopGraceMs);
    this.subscriptions.add(subscription);
    const forget = () => this.subscriptions.delete(subscription);
    driver.closed.promise.then(forget, forget);
    return subscription;
  }

  /**
   * Run `jobs` until SIGINT or SIGTERM, then stop as `stop()` does.
   *
   * What it waits for is logged; a second signal skips the grace, and cancels the handlers that still
   * run. Throws what `subscribe` and the subscription's `closed` throw.
   */
  async run(jobs: Jobs): Promise<void> {
    const subscription = this.subscribe(jobs);
    const stop = () => {
      subscription.leave(subscription.isStopping ? '0s' : undefined, 'once more to cancel them');
    };
    process.on('SIGINT', stop);
    process.on('SIGTERM', stop);
    try {
      await subscription.closed;
    } finally {
      process.off('SIGINT', stop);
      process.off('SIGTERM', stop);
    }
  }

  /** Stop all subscriptions; see `Subscription.stop`. */
  async stop(grace?: Duration): Promise<void> {
    const all = [...this.subscriptions].map((subscription) => subscription.stop(grace));
    const failed = (await Promise.allSettled(all)).find((each) => each.status === 'rejected');
    if (failed !== undefined) throw failed.reason;
  }
}

/** Jobs that are running. Made by `AnarchonClient.subscribe`. */
export class Subscription {
  private stopping = false;

  /** @internal */
  constructor(
    private readonly driver: Driver,
    /** Names the session in the sidecar's list of clients. */
    readonly sessionId: string,
    private readonly stopGraceMs: number,
  ) {
    driver.feed({ kind: 'start' });
  }

  /** Whether `stop` was called. */
  get isStopping(): boolean {
    return this.stopping;
  }

  /**
   * Done when the sidecar has accepted the jobs and answers: gives its instance's name. Rejected with
   * what `closed` is, if that comes first.
   */
  get ready(): Promise<string> {
    this.driver.ready.isAskedFor = true;
    return this.driver.ready.promise;
  }

  /**
   * Done when the subscription is over: after `stop`, or rejected with the error that ended it.
   *
   * That is a `RefusedError` (also of its kinds) where the sidecar does not accept a job or the client,
   * and a `SessionReplacedError`. It is logged where nobody has asked for it.
   */
  get closed(): Promise<void> {
    this.driver.closed.isAskedFor = true;
    return this.driver.closed.promise;
  }

  /**
   * Stop: no more runs are taken; handlers may go on for `grace`, then they are cancelled.
   *
   * `grace` is by default the client's `stopGrace`, and never longer than a job's own. Runs that were
   * cancelled are handed over to other instances at once. Called again, it can shorten the grace.
   * Gives what `closed` gives. Throws `ClientError` for a bad duration.
   */
  async stop(grace?: Duration): Promise<void> {
    this.leave(grace);
    return this.driver.closed.promise;
  }

  /**
   * Stop, and say with what is waited for how not to.
   *
   * @internal
   */
  leave(grace?: Duration, hint = ''): void {
    const graceMs = grace === undefined ? this.stopGraceMs : graceOf('grace', grace);
    this.stopping = true;
    this.driver.feed({ kind: 'stopAsked', graceMs, hint });
  }
}

// ── The driver ──────────────────────────────────────────────────────────────────────────────────

/** A promise to be settled from outside, and whether anybody holds it and so is told of an error. */
class Pledge<T> {
  isAskedFor = false;
  isSettled = false;
  readonly promise: Promise<T>;
  private settle!: { resolve: (value: T) => void; reject: (error: Error) => void };

  constructor() {
    this.promise = new Promise((resolve, reject) => (this.settle = { resolve, reject }));
    this.promise.catch(() => undefined); // an error for nobody must not end the process
  }

  resolve(value: T): void {
    this.isSettled = true;
    this.settle.resolve(value);
  }

  reject(error: Error): void {
    this.isSettled = true;
    this.settle.reject(error);
  }
}

interface DriverParts {
  readonly jobs: ReadonlyMap<string, Job>;
  readonly session: Session;
  readonly transport: Transport;
  readonly clock: Clock;
  readonly logger: Logger;
  readonly exitTimer: ExitTimer | undefined;
}

/** Feeds the session with facts and carries out its commands. */
class Driver {
  readonly ready = new Pledge<string>();
  readonly closed = new Pledge<void>();
  private readonly session: Session;
  private readonly transport: Transport;
  private readonly clock: Clock;
  private readonly logger: Logger;
  private readonly exitTimer: ExitTimer | undefined;
  private readonly trust: Trust = { endMs: 0 };
  private readonly runner: Runner;
  private readonly facts: Fact[] = [];
  private readonly confirms = new Map<number, Pledge<void>>();
  private tickets = 0;
  private timer: NodeJS.Timeout | undefined;
  private endStream: (() => void) | undefined;

  constructor({ jobs, session, transport, clock, logger, exitTimer }: DriverParts) {
    this.session = session;
    this.transport = transport;
    this.clock = clock;
    this.logger = logger;
    this.exitTimer = exitTimer;
    this.runner = new Runner(jobs, clock, this.trust, logger, {
      ended: (token, outcome) => this.feed({ kind: 'handlerEnded', token, outcome }),
      endedLate: () => this.letLive(),
      confirm: (token) => this.confirm(token),
    });
  }

  /** Take in a fact, and carry out what follows. After the end it means nothing. */
  feed(fact: Fact): void {
    this.facts.push(fact);
    // What carrying out one brings about (a handler's listener may call stop()) comes after it.
    if (this.facts.length > 1) return;
    while (this.facts[0] !== undefined) {
      try {
        if (!this.closed.isSettled) this.take(this.facts[0]);
      } catch (error) {
        this.fail(error);
      }
      this.facts.shift();
    }
  }

  /** See that what goes on by itself does not fail unseen. */
  private watch(call: Promise<void>): void {
    call.catch((error: unknown) => this.fail(error));
  }

  /** An error of our own: the session cannot go on, and handlers are told so. */
  private fail(error: unknown): void {
    if (this.closed.isSettled) return;
    this.endStream?.();
    this.end(new AnarchonError('the client has failed, by an error of its own', { cause: error }));
  }

  private take(fact: Fact): void {
    const commands = this.session.handle(this.clock.nowMs(), fact);
    commands.forEach((command) => this.carryOut(command));
    this.exitTimer?.set(this.session.exitAtMs);
    clearTimeout(this.timer);
    if (this.closed.isSettled) return;
    const wakeAtMs = this.session.wakeAtMs ?? Infinity;
    const delayMs = Math.min(Math.max(0, wakeAtMs - this.clock.nowMs()), LOOK_EVERY_MS);
    this.timer = setTimeout(() => this.feed({ kind: 'tick' }), delayMs);
  }

  /** Have a lease renewed, or throw. */
  private confirm(token: string): Promise<void> {
    if (this.closed.isSettled) throw new NotConfirmedError('the client has stopped');
    this.tickets += 1;
    const pledge = new Pledge<void>();
    this.confirms.set(this.tickets, pledge);
    this.feed({ kind: 'confirmAsked', token, ticket: this.tickets });
    return pledge.promise;
  }

  // ── Commands ──────────────────────────────────────────────────────────────────────────────────

  private carryOut(command: Command): void {
    switch (command.kind) {
      case 'openStream':
        this.openStream(command);
        break;
      case 'endStream':
        this.endStream?.();
        break;
      case 'sendKeepAlive':
        this.watch(this.sendKeepAlive(command));
        break;
      case 'sendResults':
        this.watch(this.sendResults(command));
        break;
      case 'sendClose':
        this.watch(this.sendClose(command));
        break;
      case 'startHandler':
        this.runner.start(command.assignment);
        break;
      case 'cancelHandler':
        this.runner.cancel(command.token, command.reason, command.message, command.trusted);
        break;
      case 'setTrust':
        this.trust.endMs = command.endMs;
        break;
      case 'answerConfirm':
        this.answerConfirm(command.ticket, command.error);
        break;
      case 'ready':
        this.ready.resolve(command.instanceId);
        break;
      case 'log':
        this.logger[command.level](command.message);
        break;
      case 'closed':
        this.end(command.error);
        break;
    }
  }

  private openStream({ stream, request }: Command & { kind: 'openStream' }): void {
    this.endStream?.();
    this.endStream = this.transport.subscribe(request, {
      event: (event) => this.feed({ kind: 'streamEvent', stream, event }),
      ended: (error) => this.feed({ kind: 'streamEnded', stream, error }),
    });
  }

  private async sendKeepAlive(command: Command & { kind: 'sendKeepAlive' }): Promise<void> {
    const { number, request, timeoutMs } = command;
    this.feed(
      await this.transport.keepAlive(request, timeoutMs).then(
        (response): Fact => ({ kind: 'keepAliveAnswered', number, response }),
        (error: unknown): Fact => ({
          kind: 'keepAliveFailed',
          number,
          error: known(error),
        }),
      ),
    );
  }

  private async sendResults(command: Command & { kind: 'sendResults' }): Promise<void> {
    const { tokens, request, timeoutMs } = command;
    this.feed(
      await this.transport.complete(request, timeoutMs).then(
        (response): Fact => ({ kind: 'resultsAnswered', tokens, response }),
        (error: unknown): Fact => ({ kind: 'resultsFailed', tokens, error: known(error) }),
      ),
    );
  }

  private async sendClose({ request, timeoutMs }: Command & { kind: 'sendClose' }): Promise<void> {
    try {
      await this.transport.closeSession(request, timeoutMs);
    } catch (error) {
      const why = known(error).message;
      this.logger.warn(`the session could not be closed, and ends by time-out: ${why}`);
    }
    this.feed({ kind: 'closeEnded' });
  }

  private answerConfirm(ticket: number, error: AnarchonError | undefined): void {
    const pledge = this.confirms.get(ticket);
    this.confirms.delete(ticket);
    if (error === undefined) pledge?.resolve();
    else pledge?.reject(error);
  }

  private end(error: AnarchonError | undefined): void {
    const isThrown = this.closed.isAskedFor || (this.ready.isAskedFor && !this.ready.isSettled);
    if (error !== undefined && !isThrown) {
      // One of our own is of use to nobody without what is behind it.
      const why = error.cause === undefined ? error.message : inspect(error);
      this.logger.error(`the client stops: ${why}`);
    }
    clearTimeout(this.timer);
    for (const pledge of this.confirms.values()) {
      pledge.reject(new NotConfirmedError('the client has stopped'));
    }
    // Nobody renews from here on: what still runs is told so.
    this.runner.abandon();
    this.transport.close();
    if (!this.ready.isSettled) {
      this.ready.reject(error ?? new AnarchonError('stopped before it was ready'));
    }
    if (error === undefined) this.closed.resolve();
    else this.closed.reject(error);
    this.letLive();
  }

  /** After the end: let go of the exit timer once no handler runs any more. */
  private letLive(): void {
    if (!this.runner.isRunning) this.exitTimer?.close();
  }
}

// ── Parts ───────────────────────────────────────────────────────────────────────────────────────

/** What a transport was rejected with. Anything but a `SidecarError` is a mistake in it, and thrown. */
function known(error: unknown): SidecarError {
  if (error instanceof SidecarError) return error;
  throw error;
}

function checkConcurrency(value: unknown): number {
  if (
    !Number.isInteger(value) ||
    (value as number) < 1 ||
    (value as number) > MAX_CONCURRENCY_MAX
  ) {
    throw new ClientError(`maxConcurrency ${show(value)}: must be a whole number from 1 to 10,000`);
  }
  return value as number;
}

function graceOf(field: string, value: unknown): number {
  return asDuration(`${field} ${show(value)}`, value, ClientError);
}

/**
 * Jobs: a function in, a job spec out, checked as early as can be. Imports the wire's messages, the
 * durations and the errors.
 *
 * Of a cron expression the number of fields and plain numbers are checked here. What needs the whole
 * grammar or a calendar (also zones, and the shortest gap of a cron schedule) is left to the sidecar,
 * which checks every spec at registration.
 */

import { clone, create } from '@bufbuild/protobuf';
import type { Context } from './context';
import { formatDuration, toWire, wireToMs, type Duration } from './duration';
import { asDuration, JobError, show } from './errors';
import {
  CatchUpPolicy,
  CatchUpSchema,
  CronScheduleSchema,
  EveryScheduleSchema,
  JobSpecSchema,
  OverlapPolicy,
  RetryPolicySchema,
  type JobSpec,
} from './generated/anarchon/v1/job_pb';

/**
 * What a job does: it takes the context, or nothing, and is async or not. What it returns becomes the
 * run's result: nothing, a text, or a value that becomes JSON, of which 16 KiB are kept. What it
 * throws makes the attempt fail.
 *
 * A handler that is not async, or that computes for long, holds up the event loop, and with it the
 * keep-alives of all handlers: after some seconds of that, their leases are lost.
 */
export type Handler = (ctx: Context) => unknown;

/**
 * What one may say of a job besides its schedule. What is left out, the sidecar decides. What the
 * sidecar's store cannot do, the sidecar refuses.
 */
export interface Policies {
  /**
   * The longest random wait before an instance claims a slot; less than the gap between slots.
   * Default: the smaller of 2 s and a quarter of the gap. `"0s"`: none.
   */
  jitter?: Duration | undefined;
  /** How long one attempt may take before it is cancelled, up to 366 d. Default: no limit. */
  timeout?: Duration | undefined;
  /** How often a runner says that it is alive, at most a third of the lease. Default: a sixth. */
  heartbeat?: Duration | undefined;
  /** How long a runner is believed after its last heartbeat, 3 s to 1 h. Default: 30 s. */
  lease?: Duration | undefined;
  /**
   * What a slot does that finds another run unfinished. Default: `skip` where the store keeps leases,
   * else `allow`. `queue`: it starts when the other has ended; of several that wait the newest stays.
   * `cancel`: as `queue`, and the other run is asked to stop.
   */
  overlap?: 'skip' | 'allow' | 'queue' | 'cancel' | undefined;
  /**
   * Which slots are run that came due while nobody could. Default: `latest`, the newest of them,
   * where the store keeps leases, else `none`. `all`: every one, oldest first.
   */
  catchUp?: 'none' | 'latest' | 'all' | undefined;
  /** No slot older than this is caught up, nor a run taken over. Default: 24 h. */
  catchUpWindow?: Duration | undefined;
  /** No more slots than this are caught up, 1 to 10,000. Default: 100. */
  catchUpLimit?: number | undefined;
  /**
   * A slot that nobody claimed for this long is missed, 1 s or more. Default: the gap to the next
   * slot, at most 60 s, at least jitter + 5 s.
   */
  startDeadline?: Duration | undefined;
  /**
   * Attempts a run may have because its runners died, froze or were cut off, 1 to 1,000. Default: 3.
   */
  maxAttempts?: number | undefined;
  /** Attempts that follow failed ones, 0 to 100. Default: 0, a failure is final. */
  retries?: number | undefined;
  /** The pause before the first retry. Each is drawn from 50 % to 100 % of it. Default: 1 s. */
  retryDelay?: Duration | undefined;
  /** Each pause is this many times the one before, 1 to 100. Default: 2. */
  retryFactor?: number | undefined;
  /** No pause is longer than this. Default: 1 h. */
  retryMaxDelay?: Duration | undefined;
  /**
   * Runs of the job that one instance may execute at once, 1 to 10,000. Default: no limit of its own.
   */
  concurrency?: number | undefined;
  /** Annotations for people and dashboards: at most 16, key and value at most 128 bytes each. */
  labels?: Readonly<Record<string, string>> | undefined;
  /** How long a handler that was asked to stop keeps its lease, up to 1 h. Default: 5 s. */
  cancelGrace?: Duration | undefined;
  /**
   * How long a running handler may go on when its instance stops. Default, and at most: the
   * instance's own grace, 20 s.
   */
  stopGrace?: Duration | undefined;
}

/** What `onTrigger` and `byName` take besides the handler. */
export interface JobOptions extends Policies {
  /**
   * Identifies the job in the store, and must be the same on every instance and in every deploy: 1 to
   * 128 characters of letters, digits and `. _ - : /`, starting with a letter or digit. Default: the
   * key under which the job is given to `subscribe`, else the function's own name.
   */
  name?: string | undefined;
}

/** What `every` takes besides the period and the handler. */
export interface EveryOptions extends JobOptions {
  /** Shifts the grid, by less than the period. Default: not at all. */
  offset?: Duration | undefined;
}

/** What `cron` takes besides the expression and the handler. */
export interface CronOptions extends JobOptions {
  /** The zone whose clock counts, such as `"Europe/Athens"`. Default: `"UTC"`. */
  tz?: string | undefined;
}

/** What `subscribe` and `run` take: jobs by name, or a list of jobs. */
export type Jobs = Readonly<Record<string, Job | Handler>> | readonly Job[];

/** A handler with its schedule and policies. Made by `every`, `cron`, `onTrigger` and `byName`. */
export class Job {
  /** @internal */
  constructor(
    /** What the job does. */
    readonly handler: Handler,
    /** The name given with the job, if one was. */
    readonly givenName: string | undefined,
    /** The wire's form; its name is empty until the job is subscribed. */
    readonly spec: JobSpec,
  ) {}
}

/**
 * A job that is due every `period`: on a grid counted from 1970-01-01T00:00:00Z.
 *
 * `period` is 100 ms to 366 d. Throws `JobError`.
 *
 * ```ts
 * every('10s', async (ctx) => { ... }, { timeout: '1m' })
 * ```
 */
export function every(period: Duration, handler: Handler, options: EveryOptions = {}): Job {
  return makeJob(handler, options, ({ offset, ...rest }) => {
    const periodMs = asDuration(`period ${show(period)}`, period, JobError);
    inRange('period', periodMs, PERIOD_MIN_MS, PERIOD_MAX_MS);
    const offsetMs =
      offset === undefined ? 0 : asDuration(`offset ${show(offset)}`, offset, JobError);
    if (offsetMs >= periodMs) {
      throw new JobError(
        `offset ${formatDuration(offsetMs)}: must be less than the period ${formatDuration(periodMs)}`,
      );
    }
    const value = create(EveryScheduleSchema, { period: toWire(periodMs) });
    if (offsetMs > 0) value.offset = toWire(offsetMs);
    return [{ case: 'every', value }, rest];
  });
}

/**
 * A job that is due whenever the wall clock of the zone `tz` matches `expression`.
 *
 * `expression` has five fields, or six with seconds first, or is an alias such as `@daily`. Throws
 * `JobError` for a wrong number of fields and for numbers out of range; the sidecar checks the rest.
 *
 * ```ts
 * cron('0 8 * * *', report, { tz: 'Europe/Athens' })
 * ```
 */
export function cron(expression: string, handler: Handler, options: CronOptions = {}): Job {
  return makeJob(handler, options, ({ tz = 'UTC', ...rest }) => {
    checkExpression(expression);
    checkZone(tz);
    const value = create(CronScheduleSchema, { expression: expression.trim(), timeZone: tz });
    return [{ case: 'cron', value }, rest];
  });
}

/**
 * A job without a schedule: it is never due by itself, and runs when somebody triggers it. The sidecar
 * refuses it where the store has no control, and with it the policies that are for slots: `jitter`,
 * `startDeadline`, `catchUp` and `catchUpLimit`. Throws `JobError`.
 */
export function onTrigger(handler: Handler, options: JobOptions = {}): Job {
  return makeJob(handler, options, (rest) => [{ case: undefined }, rest]);
}

/**
 * A job that is offered by its name alone: its schedule is in the sidecar's configuration, which must
 * have the job. Where both say something, the configuration wins. Throws `JobError`.
 */
export function byName(handler: Handler, options: JobOptions = {}): Job {
  const job = makeJob(handler, options, (rest) => [{ case: undefined }, rest]);
  job.spec.byName = true;
  return job;
}

/** The jobs of what `subscribe` was given, by name, with their names set. Throws `JobError`. */
export function collect(jobs: Jobs): Map<string, Job> {
  if (typeof jobs !== 'object' || (jobs as unknown) === null || jobs instanceof Job) {
    throw new JobError(
      `jobs must be an object of names and jobs, or an array of jobs, not ${show(jobs)}`,
    );
  }
  const named = Array.isArray(jobs)
    ? (jobs as readonly unknown[]).map(nameByItself)
    : Object.entries(jobs as Record<string, unknown>).map(([name, job]) => nameByKey(name, job));
  if (named.length < 1 || named.length > JOBS_MAX) {
    throw new JobError(`${named.length} jobs given: must be 1 to ${count(JOBS_MAX)}`);
  }
  const byName = new Map<string, Job>();
  for (const job of named) {
    const name = job.spec.name;
    if (byName.has(name)) {
      throw new JobError(`two jobs are named ${show(name)}: give one of them another name`);
    }
    byName.set(name, job);
  }
  return byName;
}

/** A job's spec with the name that it has by itself. Throws `JobError`. */
export function namedSpec(job: Job): JobSpec {
  return nameByItself(job).spec;
}

// ── Names and handlers ──────────────────────────────────────────────────────────────────────────

const JOBS_MAX = 10_000;
const NAME = /^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$/;

function nameByItself(job: unknown): Job {
  if (!(job instanceof Job)) {
    throw new JobError(
      `${show(job)} has no schedule: give every("10s", handler), cron(...), onTrigger(handler), byName(handler), or ` +
        "{ name: handler } where the sidecar's configuration has it",
    );
  }
  return withName(job, job.givenName ?? job.handler.name);
}

function nameByKey(name: string, job: unknown): Job {
  if (typeof job === 'function') return withName(byName(job as Handler, { name }), name);
  if (!(job instanceof Job)) {
    throw new JobError(
      `job ${show(name)}: must be every(...), cron(...), onTrigger(...), byName(...) or a function, not ${show(job)}`,
    );
  }
  if (job.givenName !== undefined && job.givenName !== name) {
    throw new JobError(
      `job ${show(job.givenName)} is given under the name ${show(name)}: use one name for both`,
    );
  }
  return withName(job, name);
}

function withName(job: Job, name: string): Job {
  checkName(name);
  const spec = clone(JobSpecSchema, job.spec);
  spec.name = name;
  return new Job(job.handler, name, spec);
}

function checkName(name: unknown): void {
  if (typeof name !== 'string' || !NAME.test(name)) {
    throw new JobError(
      `job name ${show(name)}: must be 1 to 128 characters of letters, digits and . _ - : /, ` +
        'starting with a letter or digit; give it as { name: job }, or with the option name',
    );
  }
}

function checkHandler(handler: unknown): asserts handler is Handler {
  const wanted = 'the handler must be a function (ctx) => ... or () => ...';
  if (typeof handler !== 'function') throw new JobError(`${wanted}, not ${show(handler)}`);
  if (handler.length > 1) throw new JobError(`${wanted}; it takes ${handler.length} parameters`);
  if (Object.prototype.toString.call(handler).includes('Generator')) {
    throw new JobError(`${wanted}, without yield`);
  }
}

// ── Specs ───────────────────────────────────────────────────────────────────────────────────────

const DAY_MS = 86_400_000;
const PERIOD_MIN_MS = 100;
const PERIOD_MAX_MS = 366 * DAY_MS;
const LEASE_MIN_MS = 3_000;
const LEASE_MAX_MS = 3_600_000;
const HEARTBEATS_A_LEASE = 3;
const LABELS_MAX = 16;
const LABEL_MAX_BYTES = 128;

const OVERLAP = {
  skip: OverlapPolicy.SKIP,
  allow: OverlapPolicy.ALLOW,
  queue: OverlapPolicy.QUEUE,
  cancel: OverlapPolicy.CANCEL,
};
const CATCH_UP = {
  none: CatchUpPolicy.NONE,
  latest: CatchUpPolicy.LATEST,
  all: CatchUpPolicy.ALL,
};
/** Every policy, so that one that is misspelt is found. */
const POLICIES: Record<keyof Policies, true> = {
  cancelGrace: true,
  catchUp: true,
  catchUpLimit: true,
  catchUpWindow: true,
  concurrency: true,
  heartbeat: true,
  jitter: true,
  labels: true,
  lease: true,
  maxAttempts: true,
  overlap: true,
  retries: true,
  retryDelay: true,
  retryFactor: true,
  retryMaxDelay: true,
  startDeadline: true,
  stopGrace: true,
  timeout: true,
};

type Schedule = JobSpec['schedule'];

/** A job, once `split` has taken the schedule out of the options. */
function makeJob<O extends JobOptions>(
  handler: unknown,
  options: O,
  split: (options: Omit<O, 'name'>) => [Schedule, object],
): Job {
  const { name, ...rest } = options;
  const known = name ?? (typeof handler === 'function' ? handler.name : '');
  try {
    checkHandler(handler);
    const [schedule, policies] = split(rest);
    const job = new Job(handler, name, makeSpec(schedule, policies));
    if (name !== undefined) checkName(name);
    return job;
  } catch (error) {
    if (error instanceof JobError && known) error.message = `job ${show(known)}: ${error.message}`;
    throw error;
  }
}

function makeSpec(schedule: Schedule, given: object): JobSpec {
  const unknown = Object.keys(given).filter((key) => !(key in POLICIES));
  if (unknown.length > 0) {
    const known = Object.keys(POLICIES).join(', ');
    throw new JobError(`no such policy: ${unknown.join(', ')}; there are ${known}`);
  }
  const policies = given as Policies;
  const spec = create(JobSpecSchema, { schedule });
  setDurations(spec, policies);
  setCatchUp(spec, policies);
  setRetry(spec, policies);
  setLabels(spec, policies.labels);
  if (policies.overlap !== undefined) {
    spec.overlap = choice('overlap', policies.overlap, OVERLAP);
  }
  if (policies.maxAttempts !== undefined) {
    spec.maxAttempts = whole('maxAttempts', policies.maxAttempts, 1, 1_000);
  }
  if (policies.concurrency !== undefined) {
    spec.concurrency = whole('concurrency', policies.concurrency, 1, 10_000);
  }
  checkRelations(spec);
  return spec;
}

function setDurations(spec: JobSpec, policies: Policies): void {
  const bounds = [
    ['jitter', 0, PERIOD_MAX_MS],
    ['timeout', 1, PERIOD_MAX_MS],
    ['heartbeat', 1, LEASE_MAX_MS / HEARTBEATS_A_LEASE],
    ['lease', LEASE_MIN_MS, LEASE_MAX_MS],
    ['cancelGrace', 0, LEASE_MAX_MS],
    ['stopGrace', 0, PERIOD_MAX_MS],
  ] as const;
  for (const [key, leastMs, mostMs] of bounds) {
    if (policies[key] !== undefined) {
      spec[key] = toWire(duration(key, policies[key], leastMs, mostMs));
    }
  }
}

function setCatchUp(spec: JobSpec, policies: Policies): void {
  const { catchUp, catchUpWindow, catchUpLimit, startDeadline } = policies;
  const value = create(CatchUpSchema);
  if (catchUp !== undefined) value.policy = choice('catchUp', catchUp, CATCH_UP);
  if (catchUpWindow !== undefined) {
    value.window = toWire(duration('catchUpWindow', catchUpWindow, 1, PERIOD_MAX_MS));
  }
  if (catchUpLimit !== undefined) value.limit = whole('catchUpLimit', catchUpLimit, 1, 10_000);
  if (startDeadline !== undefined) {
    value.startDeadline = toWire(duration('startDeadline', startDeadline, 1_000, PERIOD_MAX_MS));
  }
  if ([catchUp, catchUpWindow, catchUpLimit, startDeadline].some((each) => each !== undefined)) {
    spec.catchUp = value;
  }
}

function setRetry(spec: JobSpec, policies: Policies): void {
  const { retryDelay, retryFactor, retryMaxDelay } = policies;
  const retries = whole('retries', policies.retries ?? 0, 0, 100);
  if (retries === 0) {
    const spacing = (['retryDelay', 'retryFactor', 'retryMaxDelay'] as const).find(
      (key) => policies[key] !== undefined,
    );
    if (spacing) throw new JobError(`${spacing} without retries: set retries to 1 or more`);
    return;
  }
  const retry = create(RetryPolicySchema, { retries });
  const delayMs = asDuration(`retryDelay ${show(retryDelay)}`, retryDelay ?? '1s', JobError);
  const longestMs = asDuration(
    `retryMaxDelay ${show(retryMaxDelay)}`,
    retryMaxDelay ?? '1h',
    JobError,
  );
  if (delayMs < 1 || delayMs > longestMs) {
    throw new JobError(
      `retryDelay ${formatDuration(delayMs)}: must be more than zero and at most retryMaxDelay, ` +
        formatDuration(longestMs),
    );
  }
  if (retryDelay !== undefined) retry.delay = toWire(delayMs);
  if (retryMaxDelay !== undefined) retry.maxDelay = toWire(longestMs);
  if (retryFactor !== undefined) {
    if (typeof retryFactor !== 'number' || !(retryFactor >= 1 && retryFactor <= 100)) {
      throw new JobError(`retryFactor ${show(retryFactor)}: must be a number from 1 to 100`);
    }
    retry.factor = retryFactor;
  }
  spec.retry = retry;
}

function setLabels(spec: JobSpec, labels: unknown): void {
  if (labels === undefined) return;
  if (typeof labels !== 'object' || labels === null || Array.isArray(labels)) {
    throw new JobError(`labels ${show(labels)}: must be an object of texts`);
  }
  const entries = Object.entries(labels);
  if (entries.length > LABELS_MAX) {
    throw new JobError(`${entries.length} labels: must be at most ${LABELS_MAX}`);
  }
  for (const [key, value] of entries) {
    if (!isLabel(key) || !isLabel(value)) {
      throw new JobError(
        `label ${show(key)}: key and value must be texts of at most ${LABEL_MAX_BYTES} bytes each`,
      );
    }
    spec.labels[key] = value;
  }
}

function isLabel(text: unknown): text is string {
  return typeof text === 'string' && Buffer.byteLength(text) <= LABEL_MAX_BYTES;
}

function checkRelations(spec: JobSpec): void {
  if (spec.schedule.case === 'every' && spec.jitter !== undefined) {
    const jitterMs = wireToMs(spec.jitter);
    const periodMs = wireToMs(spec.schedule.value.period);
    if (jitterMs >= periodMs) {
      throw new JobError(
        `jitter ${formatDuration(jitterMs)}: must be less than the period, ${formatDuration(periodMs)}`,
      );
    }
  }
  if (spec.lease !== undefined && spec.heartbeat !== undefined) {
    const leaseMs = wireToMs(spec.lease);
    const heartbeatMs = wireToMs(spec.heartbeat);
    if (heartbeatMs * HEARTBEATS_A_LEASE > leaseMs) {
      throw new JobError(
        `heartbeat ${formatDuration(heartbeatMs)}: must be at most a third of the lease, ` +
          formatDuration(leaseMs),
      );
    }
  }
  if (spec.overlap === OverlapPolicy.CANCEL && spec.catchUp?.policy === CatchUpPolicy.ALL) {
    throw new JobError(
      'catchUp "all" with overlap "cancel": each slot caught up would cancel the one before; use ' +
        'catchUp "latest", or overlap "queue"',
    );
  }
}

// ── Cron expressions ────────────────────────────────────────────────────────────────────────────

const EXPRESSION_MAX = 1_000;
/** Name, least, most, and how the sidecar writes the range. */
const CRON_FIELDS = [
  ['second', 0, 59, '0 to 59'],
  ['minute', 0, 59, '0 to 59'],
  ['hour', 0, 23, '0 to 23'],
  ['day of month', 1, 31, '1 to 31'],
  ['month', 1, 12, '1 to 12 or JAN to DEC'],
  ['day of week', 0, 7, '0 to 7 or SUN to SAT'],
] as const;
const CRON_NUMBERS = /^([0-9]{1,2})(?:-([0-9]{1,2}))?(?:\/[0-9]+)?$/;

function checkZone(tz: unknown): void {
  if (typeof tz !== 'string' || !/^[A-Za-z0-9_+/-]{1,64}$/.test(tz)) {
    throw new JobError(`tz ${show(tz)}: must be an IANA name such as "Europe/Athens" or "UTC"`);
  }
}

function checkExpression(expression: unknown): void {
  const what = `cron expression ${show(expression)}`;
  if (typeof expression !== 'string' || expression.length > EXPRESSION_MAX) {
    throw new JobError(`${what}: must be a text of at most ${count(EXPRESSION_MAX)} characters`);
  }
  const text = expression.trim();
  if (text.startsWith('@every')) throw new JobError(`${what}: use every("10s", ...)`);
  const texts = text === '' ? [] : text.split(/\s+/);
  if (texts.length === 1 && text.startsWith('@')) return;
  if (texts.length !== CRON_FIELDS.length && texts.length !== CRON_FIELDS.length - 1) {
    throw new JobError(
      `${what}: must have five fields, or six with seconds first; it has ${texts.length}`,
    );
  }
  const fields = CRON_FIELDS.slice(-texts.length);
  for (const [index, [name, least, most, range]] of fields.entries()) {
    const field = texts[index] ?? '';
    for (const number of plainNumbers(field)) {
      if (number < least || number > most) {
        throw new JobError(`${what}: ${name} is '${field}': ${number} is outside ${range}`);
      }
    }
  }
}

/** The values of a cron field that are mere numbers, also those that bound a range. */
function plainNumbers(field: string): number[] {
  return field.split(',').flatMap((item) => {
    const match = CRON_NUMBERS.exec(item);
    return match === null ? [] : match.slice(1).filter(Boolean).map(Number);
  });
}

// ── Values ──────────────────────────────────────────────────────────────────────────────────────

function duration(key: string, value: unknown, leastMs: number, mostMs: number): number {
  const valueMs = asDuration(`${key} ${show(value)}`, value, JobError);
  return inRange(key, valueMs, leastMs, mostMs);
}

function inRange(key: string, valueMs: number, leastMs: number, mostMs: number): number {
  if (valueMs < leastMs || valueMs > mostMs) {
    const most = mostMs % DAY_MS === 0 ? `${mostMs / DAY_MS}d` : formatDuration(mostMs);
    const range = `${formatDuration(leastMs)} to ${most}`;
    throw new JobError(`${key} ${formatDuration(valueMs)}: must be ${range}`);
  }
  return valueMs;
}

function whole(key: string, value: unknown, least: number, most: number): number {
  if (!Number.isInteger(value) || (value as number) < least || (value as number) > most) {
    throw new JobError(
      `${key} ${show(value)}: must be a whole number from ${count(least)} to ${count(most)}`,
    );
  }
  return value as number;
}

function choice<C>(key: string, value: unknown, choices: Record<string, C>): C {
  const chosen =
    typeof value === 'string' && Object.hasOwn(choices, value) ? choices[value] : undefined;
  if (chosen === undefined) {
    const all = Object.keys(choices).join(', ');
    throw new JobError(`${key} ${show(value)}: must be one of ${all}`);
  }
  return chosen;
}

/** A number with its thousands marked, whatever the machine's language is. */
function count(number: number): string {
  return number.toLocaleString('en-US');
}

/**
 * Node's testee: see tests/conformance/README.md. It decides nothing; it shows what the client does.
 */

import { readFileSync, writeSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import * as anarchon from '../src/index';
import { byName, cron, every, type Context, type Job, type Policies } from '../src/index';

interface Config {
  jobs: string[];
  max_concurrency?: number;
  stop_grace?: string;
  on_lease_lost?: 'cancel' | 'exit';
  ca_file?: string;
  padding?: number;
}

const KEYS = ['jobs', 'max_concurrency', 'stop_grace', 'on_lease_lost', 'ca_file', 'padding'];
/** The first that fits. */
const KINDS = [
  ['unsupported', anarchon.UnsupportedError],
  ['version', anarchon.VersionError],
  ['credentials', anarchon.CredentialsError],
  ['refused', anarchon.RefusedError],
  ['replaced', anarchon.SessionReplacedError],
  ['setup', anarchon.JobError],
  ['setup', anarchon.ClientError],
] as const;

let isReleased = false;
let release = (): void => undefined;
const released = new Promise<void>((resolve) => {
  release = () => {
    isReleased = true;
    resolve();
  };
});

function emit(what: string, facts: object): void {
  writeSync(1, `${JSON.stringify({ what, ...facts })}\n`);
}

function named({ token, job, slot, attempt }: Context) {
  return { token, job, slot, attempt };
}

/** What `check()` says, if it refuses. */
function refusal(ctx: Context): anarchon.CancelledError | undefined {
  try {
    ctx.check();
    return undefined;
  } catch (error) {
    return error as anarchon.CancelledError;
  }
}

function told(ctx: Context, error: anarchon.CancelledError): void {
  const lost = error instanceof anarchon.LeaseLostError;
  emit('cancelled', { token: ctx.token, reason: error.reason.toUpperCase(), lost });
}

// ── What the handlers do between `started` and `ended` ──────────────────────────────────────────

const returns = (ctx: Context) => ctx.payload.toString();

function shows(ctx: Context): void {
  emit('context', {
    ...named(ctx),
    fence: `${ctx.fence}`,
    instance_id: ctx.instanceId,
    trigger: ctx.trigger,
    payload: ctx.payload.toString(),
    scheduled_at: ctx.scheduledAt.toISOString(),
    has_deadline: ctx.deadline !== undefined && ctx.deadline > new Date(),
    remaining_ms: ctx.remainingMs ?? null,
    cancelled: ctx.cancelled,
  });
}

async function confirms(ctx: Context): Promise<void> {
  const answer = await ctx.confirm().then(
    () => 'confirmed',
    (error: unknown) => (error instanceof anarchon.LeaseLostError ? 'lost' : 'unknown'),
  );
  emit('confirm', { token: ctx.token, answer });
}

async function waits(ctx: Context): Promise<void> {
  try {
    await sleep(2 ** 31 - 1, undefined, { signal: ctx.signal });
  } catch (error) {
    told(ctx, refusal(ctx) ?? (error as anarchon.CancelledError));
    throw error;
  }
}

async function polls(ctx: Context): Promise<void> {
  try {
    for (;;) {
      ctx.check();
      await sleep(10);
    }
  } catch (error) {
    told(ctx, error as anarchon.CancelledError);
    throw error;
  }
}

async function lingers(ctx: Context): Promise<string> {
  let last: anarchon.CancelledError | undefined;
  while (!isReleased) {
    const error = refusal(ctx);
    if (error?.constructor !== last?.constructor && error) told(ctx, error);
    last = error;
    await sleep(10);
  }
  if (last) throw last;
  return 'released';
}

function blocks(ctx: Context): void {
  const end = performance.now() + parseInt(ctx.payload.toString());
  while (performance.now() < end);
  const error = refusal(ctx);
  if (!error) return;
  told(ctx, error);
  throw error;
}

/** A handler that says when it begins and ends. */
function shown(does: (ctx: Context) => unknown) {
  return async (ctx: Context): Promise<unknown> => {
    emit('started', named(ctx));
    try {
      return await does(ctx);
    } finally {
      emit('ended', { token: ctx.token });
    }
  };
}

const hourly = (does: (ctx: Context) => unknown, policies: Policies = {}) =>
  every('1h', shown(does), policies);

const JOBS: Record<string, Job> = {
  succeed: hourly(returns),
  json: hourly(() => ({ rows: 3, name: 'Ωmega' })),
  fail: hourly((ctx) => {
    throw new Error(ctx.payload.toString());
  }),
  retry: hourly((ctx) => {
    throw new anarchon.Retry('again', { after: ctx.payload.toString() || undefined });
  }),
  permanent: hourly((ctx) => {
    throw new anarchon.Permanent(ctx.payload.toString());
  }),
  context: hourly(shows),
  confirm: hourly(confirms),
  wait: hourly(waits),
  poll: hourly(polls),
  linger: hourly(lingers),
  anyway: hourly((ctx) => waits(ctx).catch(() => 'done anyway')),
  stubborn: hourly(() => released.then(() => 'late')),
  block: hourly(blocks),
  policies: every('1h', shown(returns), {
    offset: '10m',
    jitter: '5s',
    timeout: '2m',
    heartbeat: '4s',
    lease: '20s',
    overlap: 'queue',
    catchUp: 'all',
    catchUpWindow: '6h',
    catchUpLimit: 7,
    startDeadline: '30s',
    maxAttempts: 4,
    retries: 5,
    retryDelay: '2s',
    retryFactor: 1.5,
    retryMaxDelay: '10m',
    concurrency: 2,
    labels: { team: 'blue' },
    cancelGrace: '3s',
    stopGrace: '15s',
  }),
  cron: cron('0 8 * * *', shown(returns), { tz: 'Europe/Athens' }),
  brief: hourly(waits, { timeout: '1s', retries: 0 }),
  named: byName(shown(returns)),
};

// ── The client, and what it is told ─────────────────────────────────────────────────────────────

function jobsOf(config: Config): Record<string, Job> {
  const jobs = Object.fromEntries(config.jobs.map((name) => [name, JOBS[name] ?? hourly(returns)]));
  const numbers = Array.from({ length: 16 }, (_, n) => `${n + 1}`.padStart(2, '0'));
  const labels = Object.fromEntries(numbers.map((n) => [n.padEnd(128, 'k'), 'v'.repeat(128)]));
  for (let number = 1; number <= (config.padding ?? 0); number += 1) {
    jobs[`padding-${number}`] = hourly(returns, { labels });
  }
  return jobs;
}

function clientOf(config: Config): anarchon.AnarchonClient {
  return new anarchon.AnarchonClient({
    maxConcurrency: config.max_concurrency,
    stopGrace: config.stop_grace,
    onLeaseLost: config.on_lease_lost,
    credentials: config.ca_file
      ? anarchon.credentials.createSsl(readFileSync(config.ca_file))
      : undefined,
  });
}

async function main(config: Config): Promise<void> {
  const subscription = clientOf(config).subscribe(jobsOf(config));
  const stop = (grace?: string) => void subscription.stop(grace).catch(() => undefined);
  process.on('SIGTERM', () => stop(subscription.isStopping ? '0s' : undefined));
  createInterface(process.stdin)
    .on('line', (line) => {
      const [word, grace] = line.trim().split(' ');
      if (word === 'release') release();
      else if (word === 'stop') stop(grace);
    })
    .on('close', () => process.exit(3)); // the suite is gone
  subscription.ready.then(
    (instance) => emit('ready', { instance }),
    () => undefined, // `closed` says it
  );
  await subscription.closed;
}

const config = JSON.parse(process.env['ANARCHON_TESTEE'] ?? '{}') as Config;
const unknown = Object.keys(config).filter((key) => !KEYS.includes(key));
if (!Array.isArray(config.jobs) || unknown.length > 0) {
  console.error(`ANARCHON_TESTEE: no jobs, or no such key: ${unknown.join(', ')}`);
  process.exit(2);
}
main(config).then(
  () => {
    emit('closed', { error: '', message: '' });
    process.exit(0);
  },
  (error: unknown) => {
    const kind = KINDS.find(([, type]) => error instanceof type)?.[0] ?? 'other';
    emit('closed', { error: kind, message: (error as Error).message });
    process.exit(1);
  },
);

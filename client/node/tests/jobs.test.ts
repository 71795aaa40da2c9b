import { create, toJson } from '@bufbuild/protobuf';
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { JobError } from '../src/errors';
import { JobSpecSchema } from '../src/generated/anarchon/v1/job_pb';
import { byName, collect, cron, every, onTrigger, type Job, type Jobs } from '../src/jobs';
import { vectors } from './vectors';

function nothing(): void {
  /* does nothing */
}

/** What is sent of a job. */
function sent(job: Job): unknown {
  const [named] = collect([job]).values();
  return toJson(JobSpecSchema, named?.spec ?? create(JobSpecSchema));
}

function refused(make: () => unknown, message: string): void {
  assert.throws(make, (error: unknown) => {
    assert.ok(error instanceof JobError, String(error));
    assert.ok(error.message.includes(message), `'${error.message}' lacks '${message}'`);
    return true;
  });
}

test('what is not said is left to the sidecar', () => {
  assert.deepEqual(sent(every('10s', nothing)), { name: 'nothing', every: { period: '10s' } });
  assert.deepEqual(sent(every('10s', nothing, { jitter: '0s', timeout: undefined })), {
    name: 'nothing',
    every: { period: '10s' },
    jitter: '0s',
  });
});

test('policies become the spec', () => {
  const job = every('10s', nothing, {
    name: 'sync',
    offset: '1s',
    jitter: '1s',
    timeout: '5m',
    heartbeat: '2s',
    lease: '12s',
    overlap: 'queue',
    catchUp: 'all',
    catchUpWindow: '1h',
    catchUpLimit: 7,
    startDeadline: '30s',
    maxAttempts: 5,
    retries: 2,
    retryDelay: '5s',
    retryFactor: 3,
    retryMaxDelay: '1m',
    concurrency: 4,
    labels: { team: 'billing' },
    cancelGrace: '3s',
    stopGrace: '10s',
  });
  assert.deepEqual(sent(job), {
    name: 'sync',
    every: { period: '10s', offset: '1s' },
    jitter: '1s',
    timeout: '300s',
    heartbeat: '2s',
    lease: '12s',
    overlap: 'OVERLAP_POLICY_QUEUE',
    catchUp: { policy: 'CATCH_UP_POLICY_ALL', window: '3600s', limit: 7, startDeadline: '30s' },
    maxAttempts: 5,
    retry: { retries: 2, delay: '5s', factor: 3, maxDelay: '60s' },
    concurrency: 4,
    labels: { team: 'billing' },
    cancelGrace: '3s',
    stopGrace: '10s',
  });
});

test('a cron job, one that is only triggered, and one by name', () => {
  assert.deepEqual(sent(cron(' 0 8 * * * ', nothing, { tz: 'Europe/Athens' })), {
    name: 'nothing',
    cron: { expression: '0 8 * * *', timeZone: 'Europe/Athens' },
  });
  assert.deepEqual(sent(cron('@daily', nothing)), {
    name: 'nothing',
    cron: { expression: '@daily', timeZone: 'UTC' },
  });
  assert.deepEqual(sent(onTrigger(nothing, { overlap: 'queue' })), {
    name: 'nothing',
    overlap: 'OVERLAP_POLICY_QUEUE',
  });
  assert.deepEqual(sent(byName(nothing, { retries: 1 })), {
    name: 'nothing',
    byName: true,
    retry: { retries: 1 },
  });
});

test('a job is named by its key, by its name, by its function', () => {
  const names = (jobs: Jobs) => [...collect(jobs).keys()];
  assert.deepEqual(names({ a: every('1s', () => 1), 'b/c': nothing }), ['a', 'b/c']);
  assert.deepEqual(names([every('1s', nothing), every('1s', nothing, { name: 'a' })]), [
    'nothing',
    'a',
  ]);
  // One job may be given under two names.
  const job = every('1s', () => 1);
  assert.deepEqual(names({ a: job, b: job }), ['a', 'b']);
  assert.equal(collect({ plain: nothing }).get('plain')?.spec.byName, true);
});

test('a bad name, or one given twice, is refused', () => {
  refused(() => every('1s', nothing, { name: '' }), "job name ''");
  refused(() => collect({ 'a b': every('1s', nothing) }), "job name 'a b': must be 1 to 128");
  refused(() => collect([every('1s', () => 1)]), "job name '': must be");
  refused(() => collect({ a: every('1s', nothing, { name: 'b' }) }), 'use one name for both');
  refused(
    () => collect([every('1s', nothing), byName(nothing)]),
    "two jobs are named 'nothing': give one of them another name",
  );
});

test('what is no jobs is refused', () => {
  refused(() => collect([]), '0 jobs given: must be 1 to 10,000');
  refused(() => collect({}), '0 jobs given');
  refused(() => collect(nothing as never), 'jobs must be an object');
  refused(() => collect(every('1s', nothing) as never), 'jobs must be an object');
  refused(() => collect([nothing] as never), 'has no schedule: give every("10s", handler)');
  refused(() => collect({ a: 3 } as never), "job 'a': must be every(...)");
  const many = Object.fromEntries(Array.from({ length: 10_001 }, (_, n) => [`j${n}`, nothing]));
  refused(() => collect(many), '10001 jobs given: must be 1 to 10,000');
});

test('a handler takes the context or nothing, and does not yield', () => {
  refused(
    () => every('1s', 3 as never),
    'the handler must be a function (ctx) => ... or () => ...',
  );
  refused(() => every('1s', Math.atan2 as never), 'it takes 2 parameters');
  refused(
    () =>
      every('1s', function* name() {
        yield 1;
      }),
    "job 'name': the handler must be a function",
  );
  refused(
    () =>
      every('1s', async function* () {
        yield await Promise.resolve(1);
      }),
    'without yield',
  );
});

test('a bad policy is refused by name and value', () => {
  const cases: [object, string][] = [
    [{ jitter: '10s' }, 'jitter 10s: must be less than the period, 10s'],
    [{ jitter: -1 }, 'jitter -1: write a text such as "10s", not number'],
    [{ timeout: '0s' }, 'timeout 0s: must be 1ms to 366d'],
    [{ lease: '2s' }, 'lease 2s: must be 3s to 1h'],
    [{ lease: '2h' }, 'lease 2h: must be 3s to 1h'],
    [{ lease: '9s', heartbeat: '4s' }, 'heartbeat 4s: must be at most a third of the lease, 9s'],
    [{ heartbeat: '30m' }, 'heartbeat 30m: must be 1ms to 20m'],
    [{ overlap: 'wait' }, "overlap 'wait': must be one of skip, allow, queue, cancel"],
    [{ overlap: 'toString' }, "overlap 'toString': must be one of"],
    [{ catchUp: 'some' }, "catchUp 'some': must be one of none, latest, all"],
    [{ catchUp: 'all', overlap: 'cancel' }, 'catchUp "all" with overlap "cancel"'],
    [{ catchUpLimit: 0 }, 'catchUpLimit 0: must be a whole number from 1 to 10,000'],
    [{ catchUpWindow: '0s' }, 'catchUpWindow 0s: must be 1ms to'],
    [{ startDeadline: '1ms' }, 'startDeadline 1ms: must be 1s to'],
    [{ maxAttempts: 1_001 }, 'maxAttempts 1001: must be a whole number from 1 to 1,000'],
    [{ maxAttempts: true }, 'maxAttempts true: must be a whole number'],
    [{ concurrency: '2' }, "concurrency '2': must be a whole number from 1 to 10,000"],
    [{ retries: 101 }, 'retries 101: must be a whole number from 0 to 100'],
    [{ retryDelay: '1s' }, 'retryDelay without retries: set retries to 1 or more'],
    [{ retries: 1, retryDelay: '2h' }, 'must be more than zero and at most retryMaxDelay, 1h'],
    [{ retries: 1, retryDelay: '0s' }, 'retryDelay 0s: must be more than zero'],
    [{ retries: 1, retryFactor: 0.5 }, 'retryFactor 0.5: must be a number from 1 to 100'],
    [{ labels: ['a'] }, "labels [ 'a' ]: must be an object of texts"],
    [{ labels: { a: 1 } }, "label 'a': key and value must be texts"],
    [{ labels: { a: 'ü'.repeat(65) } }, 'at most 128 bytes'],
    [{ labels: Object.fromEntries(Array.from({ length: 17 }, (_, n) => [n, ''])) }, '17 labels'],
    [{ retry: 3 }, 'no such policy: retry; there are cancelGrace, catchUp, '],
    [{ offset: '10s' }, 'offset 10s: must be less than the period 10s'],
  ];
  for (const [policies, message] of cases) {
    const make = () => every('10s', nothing, policies);
    refused(make, message);
    refused(make, "job 'nothing': ");
  }
});

test('a bad schedule is refused', () => {
  refused(() => every('99ms', nothing), 'period 99ms: must be 100ms to 366d');
  refused(() => every('367d', nothing), 'must be 100ms to');
  refused(() => every('10', nothing), `period '10': a number needs its unit: "10s" is seconds`);
  refused(
    () => cron('0 8 * *', nothing),
    'must have five fields, or six with seconds first; it has 4',
  );
  refused(() => cron('', nothing), 'it has 0');
  refused(() => cron('@every 10s', nothing), 'use every("10s"');
  refused(() => cron('x'.repeat(1_001), nothing), 'at most 1,000 characters');
  refused(() => cron(5 as never, nothing), 'must be a text');
  refused(() => cron('0 8 * * *', nothing, { tz: '' }), 'must be an IANA name such as');
  refused(() => cron('0 8 * * *', nothing, { tz: 'Europe Athens' }), 'must be an IANA name');
  refused(() => cron('0 8 * * *', nothing, { offset: '1s' } as never), 'no such policy: offset');
});

test('a number out of range is refused where it is written, in the sidecar’s words', () => {
  const { cases } = vectors('refused.json') as {
    cases: { expression: string; field: string; why: string }[];
  };
  let seen = 0;
  for (const { expression, field, why } of cases) {
    const [number = '', rest] = why.split(' is outside ');
    if (rest === undefined || expression.includes(`${number}L`) || expression.includes('W'))
      continue;
    refused(() => cron(expression, nothing), `${field} is '`);
    refused(() => cron(expression, nothing), `: ${why}`);
    seen += 1;
  }
  assert.ok(seen >= 9, `${seen} seen`);
});

test('every schedule that a sidecar takes can be written', () => {
  const { cases } = vectors('crons.json') as { cases: { schedule: string; time_zone: string }[] };
  for (const { schedule, time_zone } of cases) cron(schedule, nothing, { tz: time_zone });
  assert.ok(cases.length > 300);
});

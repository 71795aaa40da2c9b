/** Admin calls, to a server that answers as the test says. */

import { create } from '@bufbuild/protobuf';
import * as grpc from '@grpc/grpc-js';
import assert from 'node:assert/strict';
import { test, type TestContext } from 'node:test';
import { once } from 'node:events';
import {
  AdminClient,
  ClientError,
  every,
  NotFoundError,
  RefusedError,
  SidecarUnavailableError,
} from '../src/index';
import {
  AdminService,
  GetInstanceResponseSchema,
  GetJobResponseSchema,
  ListInstancesResponseSchema,
  ListJobsResponseSchema,
  ListRunsResponseSchema,
  PauseJobResponseSchema,
  PreviewSlotsResponseSchema,
  ResumeJobResponseSchema,
  RunState,
  TriggerRunResponseSchema,
  CancelRunResponseSchema,
  GetRunResponseSchema,
  type GetInstanceRequest,
  type ListRunsRequest,
  type PreviewSlotsRequest,
  type TriggerRunRequest,
  type WatchRunsRequest,
  WatchRunsResponseSchema,
  type CancelRunRequest,
} from '../src/v1';
import { PuppetServer, status } from './puppet_server';

/** An admin client whose sidecar answers so, and what it was asked. */
async function asking(t: TestContext, answers: Record<string, (request: never) => unknown>) {
  const requests: unknown[] = [];
  const calls = Object.entries(answers).map(([method, answer]) => [
    method,
    (call: { request: unknown }, callback: grpc.sendUnaryData<unknown>) => {
      requests.push(call.request);
      const answered = answer(call.request as never) as { code?: unknown };
      if ('code' in answered) callback(answered as never);
      else callback(null, answered);
    },
  ]);
  const server = new PuppetServer(AdminService, Object.fromEntries(calls) as never);
  await server.start();
  const admin = new AdminClient({ address: server.address });
  t.after(() => {
    admin.close();
    server.stop();
  });
  return { admin, requests };
}

async function all<T>(items: AsyncIterable<T>): Promise<T[]> {
  const list: T[] = [];
  for await (const item of items) list.push(item);
  return list;
}

test('lists go through all pages', async (t) => {
  const { admin, requests } = await asking(t, {
    listJobs: ({ pageToken }: { pageToken: string }) =>
      create(ListJobsResponseSchema, {
        jobs: [{ description: pageToken || 'first' }],
        nextPageToken: pageToken ? '' : 'next',
      }),
    listInstances: () => create(ListInstancesResponseSchema, { instances: [{ instanceId: 'a' }] }),
  });
  const jobs = await all(admin.listJobs());
  assert.deepEqual(
    jobs.map(({ description }) => description),
    ['first', 'next'],
  );
  assert.deepEqual(
    requests.map((request) => (request as { pageSize: number }).pageSize),
    [500, 500],
  );
  assert.equal((await all(admin.listInstances()))[0]?.instanceId, 'a');
});

test('runs are listed as asked for, and no more than the limit', async (t) => {
  const { admin, requests } = await asking(t, {
    listRuns: ({ pageToken }: ListRunsRequest) => {
      const first = Number(pageToken || 0);
      return create(ListRunsResponseSchema, {
        runs: [0, 1, 2].map((n) => ({ slot: BigInt(first + n) })),
        nextPageToken: `${first + 3}`,
      });
    },
  });
  const runs = await all(
    admin.listRuns({ job: 'sync', states: [RunState.FAILED], fromSlot: 5, limit: 4 }),
  );
  assert.deepEqual(
    runs.map(({ slot }) => slot),
    [0n, 1n, 2n, 3n],
  );
  const [request] = requests as ListRunsRequest[];
  assert.equal(request?.job, 'sync');
  assert.deepEqual(
    [request.states, request.fromSlot, request.pageSize],
    [[RunState.FAILED], 5n, 4],
  );
  await assert.rejects(all(admin.listRuns({ limit: 0 })), /limit 0: must be at least 1/);
  await assert.rejects(all(admin.listRuns({ untilSlot: 1.5 })), /untilSlot 1.5: must be whole/);
});

test('jobs are paused and resumed, runs triggered and cancelled', async (t) => {
  const { admin, requests } = await asking(t, {
    getJob: () => create(GetJobResponseSchema, { job: { paused: false } }),
    pauseJob: () => create(PauseJobResponseSchema, { job: { paused: true } }),
    resumeJob: () => create(ResumeJobResponseSchema, { job: { paused: false } }),
    triggerRun: ({ requestId }: TriggerRunRequest) =>
      create(TriggerRunResponseSchema, { run: { requestId } }),
    cancelRun: ({ reason }: CancelRunRequest) =>
      create(CancelRunResponseSchema, { run: { cancelRequested: true, cancelMessage: reason } }),
    getRun: () => create(GetRunResponseSchema, { run: { state: RunState.RUNNING } }),
    getInstance: () => create(GetInstanceResponseSchema, { instance: { instanceId: 'web-1' } }),
  });
  assert.equal((await admin.getJob('sync')).paused, false);
  assert.equal((await admin.pauseJob('sync', { reason: 'moving' })).paused, true);
  assert.equal((await admin.resumeJob('sync')).paused, false);
  const run = await admin.triggerRun('sync', { payload: 'Ω' });
  assert.match(run.requestId, /^[0-9a-f-]{36}$/);
  assert.equal((await admin.triggerRun('sync', { requestId: 'mine' })).requestId, 'mine');
  assert.equal((await admin.cancelRun('sync', 5, { reason: 'no' })).cancelMessage, 'no');
  assert.equal((await admin.getRun('sync', 5n)).state, RunState.RUNNING);
  assert.equal((await admin.getInstance()).instanceId, 'web-1');
  const triggered = requests[3] as TriggerRunRequest;
  assert.equal(Buffer.from(triggered.payload).toString(), 'Ω');
});

test('what the last answer covers is kept', async (t) => {
  const own = new grpc.Metadata();
  own.set('anarchon-scope', 'instance=an%20swering:1');
  const server = new PuppetServer(AdminService, {
    getInstance: (call, callback) => {
      const { instanceId } = call.request as GetInstanceRequest;
      const instance = create(GetInstanceResponseSchema, { instance: { instanceId } });
      callback(null, instance, instanceId ? undefined : own);
    },
  });
  await server.start();
  const admin = new AdminClient({ address: server.address });
  t.after(() => {
    admin.close();
    server.stop();
  });
  await admin.getInstance();
  assert.equal(admin.scope, 'instance=an swering:1');
  await admin.getInstance('other');
  assert.equal(admin.scope, '');
});

test('slots are previewed of a job by name, and of any job', async (t) => {
  const { admin, requests } = await asking(t, {
    previewSlots: () => create(PreviewSlotsResponseSchema, { slots: [1n, 2n] }),
  });
  assert.deepEqual(await admin.previewSlots('sync', { after: new Date(5_000), count: 2 }), [1, 2]);
  await admin.previewSlots(every('10s', () => 1, { name: 'other' }));
  const [named, any] = requests as PreviewSlotsRequest[];
  assert.deepEqual([named?.of.value, named?.count, named?.afterTime?.seconds], ['sync', 2, 5n]);
  assert.equal(any?.of.case === 'spec' && any.of.value.name, 'other');
  await assert.rejects(admin.previewSlots('sync', { count: 2 ** 40 }), ClientError);
});

test('errors are those of the tree, in the server’s words', async (t) => {
  const { admin } = await asking(t, {
    getJob: () => status(grpc.status.NOT_FOUND, 'no job sync', 'JOB_NOT_FOUND'),
    cancelRun: () => status(grpc.status.FAILED_PRECONDITION, 'it has ended', 'RUN_FINAL'),
  });
  await assert.rejects(admin.getJob('sync'), (error: Error) => {
    return error instanceof NotFoundError && error.message === 'no job sync';
  });
  await assert.rejects(admin.cancelRun('sync', 5), RefusedError);
});

test('what cannot be sent is named, and not sent', async (t) => {
  const { admin, requests } = await asking(t, {});
  const calls: [string, () => Promise<unknown>][] = [
    [
      'payload of 65537 bytes: must be at most 65536 bytes',
      () => admin.triggerRun('sync', { payload: Buffer.alloc(64 * 1_024 + 1) }),
    ],
    [
      'requestId of 130 bytes: must be at most 128 bytes',
      () => admin.triggerRun('sync', { requestId: 'é'.repeat(65) }),
    ],
    [
      'reason of 1025 bytes: must be at most 1024 bytes',
      () => admin.pauseJob('sync', { reason: 'x'.repeat(1_025) }),
    ],
    [
      'reason of 9000 bytes: must be at most 1024 bytes',
      () => admin.cancelRun('sync', 1, { reason: 'x'.repeat(9_000) }),
    ],
    ['must be at most 4194304 bytes', () => admin.getJob('x'.repeat(5_000_000))],
    ['fromSlot 0.5: must be whole', () => admin.watchRuns({ fromSlot: 0.5 })],
  ];
  for (const [message, call] of calls) {
    await assert.rejects(call, (error: Error) => {
      assert.ok(error instanceof ClientError);
      assert.ok(error.message.includes(message), error.message);
      return true;
    });
  }
  assert.deepEqual(requests, []);
});

// ── Watching ────────────────────────────────────────────────────────────────────────────────────

/** An admin client whose sidecar has two changes for a watch, and that watch as the sidecar sees it. */
async function watching(t: TestContext) {
  const requests: WatchRunsRequest[] = [];
  const calls: grpc.ServerWritableStream<unknown, unknown>[] = [];
  const server = new PuppetServer(AdminService, {
    watchRuns: (call) => {
      requests.push(call.request as WatchRunsRequest);
      calls.push(call);
      const { job } = call.request as WatchRunsRequest;
      if (job === 'slow') return;
      if (job === 'nowhere') {
        call.emit('error', status(14, 'the store does not answer now', 'STORE_UNAVAILABLE'));
        return;
      }
      call.sendMetadata(new grpc.Metadata());
      for (const slot of [1n, 2n]) call.write(create(WatchRunsResponseSchema, { run: { slot } }));
      if (job === 'stopping') {
        call.emit('error', status(14, 'the sidecar is going away', 'DRAINING'));
      }
    },
  });
  await server.start();
  const admin = new AdminClient({ address: server.address });
  t.after(() => {
    admin.close();
    server.stop();
  });
  return { admin, requests, calls };
}

const toldOf = async ([call]: grpc.ServerWritableStream<unknown, unknown>[]) => {
  if (call && !call.cancelled) await once(call, 'cancelled');
};

test('watched runs come as they change, until the loop is left', async (t) => {
  const { admin, requests, calls } = await watching(t);
  const changes = await admin.watchRuns({ job: 'sync', fromSlot: 1, untilSlot: 9n });
  const [request] = requests;
  assert.deepEqual([request?.job, request?.fromSlot, request?.untilSlot], ['sync', 1n, 9n]);
  const slots: bigint[] = [];
  for await (const { slot } of changes) {
    slots.push(slot);
    if (slot === 2n) break;
  }
  assert.deepEqual(slots, [1n, 2n]);
  await toldOf(calls);
  assert.deepEqual(await all(changes), [], 'over');
});

test('a watch that is closed ends for whoever waits for it', async (t) => {
  const { admin, calls } = await watching(t);
  const changes = await admin.watchRuns();
  await changes.next();
  await changes.next();
  const waiting = changes.next();
  changes.close();
  assert.deepEqual(await waiting, { done: true, value: undefined });
  await toldOf(calls);
});

test('a watch ends with its signal, by its reason', async (t) => {
  const { admin, calls } = await watching(t);
  const controller = new AbortController();
  const changes = await admin.watchRuns({ signal: controller.signal });
  await changes.next();
  await changes.next();
  const waiting = changes.next();
  controller.abort(new Error('enough'));
  await assert.rejects(waiting, /^Error: enough$/);
  await toldOf(calls);
  await assert.rejects(admin.watchRuns({ signal: controller.signal }), /^Error: enough$/);
  assert.equal(calls.length, 1);
});

test('a watch that the sidecar ends gives what came, and says why', async (t) => {
  const { admin } = await watching(t);
  const slots: bigint[] = [];
  await assert.rejects(
    async () => {
      for await (const { slot } of await admin.watchRuns({ job: 'stopping' })) slots.push(slot);
    },
    (error: Error) => {
      assert.ok(error instanceof SidecarUnavailableError);
      assert.deepEqual([error.reason, error.message], ['DRAINING', 'the sidecar is going away']);
      return true;
    },
  );
  assert.deepEqual(slots, [1n, 2n]);
});

test('a watch that cannot begin is refused at once', async (t) => {
  const { admin, calls } = await watching(t);
  await assert.rejects(admin.watchRuns({ job: 'nowhere' }), /the store does not answer now/);
  Object.assign(admin, { timeoutMs: 100 });
  await assert.rejects(
    admin.watchRuns({ job: 'slow' }),
    /the sidecar at 127.0.0.1:\d+ did not begin to watch within 0.1 s/,
  );
  await toldOf(calls.slice(-1));
  const absent = new AdminClient({ address: '127.0.0.1:1' });
  t.after(() => absent.close());
  await assert.rejects(absent.watchRuns(), /no sidecar answers at 127.0.0.1:1; start one with/);
});

/** Admin calls, to a server that answers as the test says. */

import { create } from '@bufbuild/protobuf';
import * as grpc from '@grpc/grpc-js';
import assert from 'node:assert/strict';
import { test, type TestContext } from 'node:test';
import { AdminClient, ClientError, every, NotFoundError, RefusedError } from '../src/index';
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
  type ListRunsRequest,
  type PreviewSlotsRequest,
  type TriggerRunRequest,
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
    cancelRun: () => create(CancelRunResponseSchema, { run: { cancelRequested: true } }),
    getRun: () => create(GetRunResponseSchema, { run: { state: RunState.RUNNING } }),
    getInstance: () => create(GetInstanceResponseSchema, { instance: { instanceId: 'web-1' } }),
  });
  assert.equal((await admin.getJob('sync')).paused, false);
  assert.equal((await admin.pauseJob('sync', { reason: 'moving' })).paused, true);
  assert.equal((await admin.resumeJob('sync')).paused, false);
  const run = await admin.triggerRun('sync', { payload: 'Ω' });
  assert.match(run.requestId, /^[0-9a-f-]{36}$/);
  assert.equal((await admin.triggerRun('sync', { requestId: 'mine' })).requestId, 'mine');
  assert.equal((await admin.cancelRun('sync', 5, { reason: 'no' })).cancelRequested, true);
  assert.equal((await admin.getRun('sync', 5n)).state, RunState.RUNNING);
  assert.equal((await admin.getInstance()).instanceId, 'web-1');
  const triggered = requests[3] as TriggerRunRequest;
  assert.equal(Buffer.from(triggered.payload).toString(), 'Ω');
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

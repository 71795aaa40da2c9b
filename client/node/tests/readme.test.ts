/** The first program of the README, run as its reader would run it. */

import { create } from '@bufbuild/protobuf';
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { pathToFileURL } from 'node:url';
import { toWire } from '../src/duration';
import {
  CompleteResponseSchema,
  KeepAliveResponseSchema,
  ReceiptStatus,
  SubscribeResponseSchema,
  type CompleteRequest,
  type KeepAliveRequest,
  type SubscribeRequest,
} from '../src/generated/anarchon/v1/session_pb';
import { makeAssignment } from '../src/testing';
import { PuppetServer } from './puppet_server';

test('the program of the README prints what the README says', async (t) => {
  const readme = readFileSync(join(__dirname, '../../README.md'), 'utf8');
  const [, code = ''] = /```js\n([^]*?)```/.exec(readme) ?? [];
  assert.match(code, /from 'anarchon'/);
  const ttl = toWire(15_000);
  let jobs: string[] = [];
  const server = await PuppetServer.polite({
    subscribe: (call) => {
      jobs = (call.request as SubscribeRequest).jobs.map(({ name }) => name);
      const attached = { instanceId: 'yourhost:12695', sessionTtl: ttl };
      const runs = { assignments: [makeAssignment('sync', {}), makeAssignment('report', {})] };
      call.write(create(SubscribeResponseSchema, { event: { case: 'attached', value: attached } }));
      call.write(create(SubscribeResponseSchema, { event: { case: 'runs', value: runs } }));
    },
    keepAlive: (call, callback) => {
      const { confirm } = call.request as KeepAliveRequest;
      const answer = { sessionTtl: ttl, streamOpen: true, confirmed: confirm };
      callback(null, create(KeepAliveResponseSchema, answer));
    },
    complete: (call, callback) => {
      const { results } = call.request as CompleteRequest;
      const receipts = results.map(() => ({ status: ReceiptStatus.RECORDED }));
      callback(null, create(CompleteResponseSchema, { receipts }));
      const gave = results.map(
        ({ outcome }) => outcome?.result.case === 'success' && outcome.result.value.result,
      );
      if (gave.includes('{"rows":3}')) {
        child.kill('SIGINT');
      }
    },
    closeSession: (_, callback) => callback(null, {}),
  }).start();
  t.after(() => server.stop());
  const main = pathToFileURL(join(__dirname, '../src/index.js')).href;
  const program = code.replace("'anarchon'", `'${main}'`);
  const child = spawn(process.execPath, ['--input-type=module', '-e', program], {
    env: { ...process.env, ANARCHON_ADDRESS: server.address },
  });
  t.after(() => child.kill('SIGKILL'));
  let out = '';
  let log = '';
  child.stdout.on('data', (chunk: Buffer) => (out += chunk.toString()));
  child.stderr.on('data', (chunk: Buffer) => (log += chunk.toString()));
  assert.deepEqual(await once(child, 'close'), [0, null], log);
  assert.deepEqual(jobs, ['sync', 'report']);
  assert.match(out, /^2026-10-10T12:00:10.000Z attempt 1: 3 rows$/m);
  assert.match(log, /^anarchon: attached to instance yourhost:12695$/m);
});

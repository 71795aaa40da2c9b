/** What needs a process of its own: signals, the end of the process, who we are. */

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { test, type TestContext } from 'node:test';
import { SystemClock } from '../src/clock';
import { clientInfo, VERSION } from '../src/process_info';

const PACKAGE = join(__dirname, '../..');

/** A program that has the client as `anarchon` and a `sidecar` to pull the strings of. */
function program(t: TestContext, code: string) {
  const prelude = `
    const anarchon = require('${join(__dirname, '../src/index.js')}');
    const { FakeSidecar } = require('${join(__dirname, '../src/testing.js')}');
    const sidecar = new FakeSidecar();
    const say = (text) => require('node:fs').writeSync(1, text + '\\n');
    const block = (ms) => { const end = Date.now() + ms; while (Date.now() < end); };
  `;
  const child = spawn(process.execPath, ['-e', prelude + code], {
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  t.after(() => child.kill('SIGKILL'));
  const lines = createInterface(child.stdout)[Symbol.asyncIterator]();
  let errors = '';
  child.stderr.on('data', (chunk: Buffer) => (errors += chunk.toString()));
  const ended = once(child, 'close') as Promise<[number | null, NodeJS.Signals | null]>;
  return {
    child,
    line: async () => ((await lines.next()) as { value: unknown }).value,
    ended,
    errors: () => errors,
  };
}

test('run() stops at SIGTERM, lets handlers finish, and the process ends by itself', async (t) => {
  const { child, line, ended, errors } = program(
    t,
    `
    const handler = async (ctx) => { say('started'); await new Promise((go) => process.on('SIGTERM', go)); };
    const client = new anarchon.AnarchonClient({ transport: sidecar });
    client.run({ sync: anarchon.every('1h', handler) }).then(() => say('over ' + sidecar.closes.length));
    sidecar.waitFor(() => sidecar.keepAlives.length).then(() => setImmediate(() => sidecar.assign('sync')));
    `,
  );
  assert.equal(await line(), 'started');
  child.kill('SIGTERM');
  assert.equal(await line(), 'over 1');
  assert.deepEqual(await ended, [0, null]);
  assert.match(errors(), /waiting up to 20s for 1 handler \(sync\); once more to cancel them/);
});

test('a second signal cancels the handlers', async (t) => {
  const { child, line, ended } = program(
    t,
    `
    const handler = async (ctx) => { say('started'); process.once('SIGINT', () => say('once')); await ctx.sleep('1h'); };
    const client = new anarchon.AnarchonClient({ transport: sidecar });
    client.run({ sync: anarchon.every('1h', handler) });
    sidecar.waitFor(() => sidecar.keepAlives.length).then(() => setImmediate(() => sidecar.assign('sync')));
    `,
  );
  assert.equal(await line(), 'started');
  child.kill('SIGINT');
  assert.equal(await line(), 'once');
  child.kill('SIGINT');
  assert.deepEqual(await ended, [0, null]);
});

test('a subscription keeps the process alive without a sidecar, and no longer than itself', async (t) => {
  const { child, line, ended } = program(
    t,
    `
    const client = new anarchon.AnarchonClient({ address: '127.0.0.1:1', logger: { ...console, warn: say } });
    const subscription = client.subscribe({ sync: anarchon.every('1h', () => 1) });
    process.on('SIGTERM', () => subscription.stop());
    `,
  );
  assert.match(String(await line()), /no sidecar answers at 127.0.0.1:1/);
  child.kill('SIGTERM');
  assert.deepEqual(await ended, [0, null]);
});

for (const [what, handler, end] of [
  ['that does not obey: by exit', 'new Promise(() => {})', [1, null]],
  ['that has the event loop for itself: by a kill', 'block(60_000)', [null, 'SIGKILL']],
] as const) {
  test(`onLeaseLost exit ends the process under a handler ${what}`, async (t) => {
    const { line, ended } = program(
      t,
      `
      sidecar.keepAliveInterval = '300ms';
      sidecar.sessionTtl = '900ms';
      const handler = async (ctx) => { sidecar.isSilent = true; say('started'); await ${handler}; };
      const client = new anarchon.AnarchonClient({ transport: sidecar, onLeaseLost: 'exit' });
      client.run({ sync: anarchon.every('1h', handler) });
      sidecar.waitFor(() => sidecar.keepAlives.length).then(() => setImmediate(() => sidecar.assign('sync')));
      `,
    );
    assert.equal(await line(), 'started');
    assert.deepEqual(await ended, end);
  });
}

test('onLeaseLost exit lets a process live whose handlers obey', async (t) => {
  const { line, ended } = program(
    t,
    `
    sidecar.keepAliveInterval = '300ms';
    sidecar.sessionTtl = '900ms';
    const handler = async (ctx) => { sidecar.isSilent = true; say('started'); await ctx.sleep('1h'); };
    const client = new anarchon.AnarchonClient({ transport: sidecar, onLeaseLost: 'exit' });
    const subscription = client.subscribe({ sync: anarchon.every('1h', handler) });
    sidecar.waitFor(() => sidecar.keepAlives.length).then(async () => {
      await new Promise(setImmediate);
      const { result } = await sidecar.assign('sync').outcome;
      say(result.case);
      await new Promise((go) => setTimeout(go, 1_000));
      await subscription.stop();
    });
    `,
  );
  assert.equal(await line(), 'started');
  assert.equal(await line(), 'stopped');
  assert.deepEqual(await ended, [0, null]);
});

test('the version is the package’s', () => {
  const { version } = JSON.parse(readFileSync(join(PACKAGE, 'package.json'), 'utf8')) as {
    version: string;
  };
  assert.equal(VERSION, version);
});

test('the process says who it is, or does not where its end means nothing', () => {
  const info = clientInfo(true);
  assert.deepEqual([info.language, info.processId], ['node', process.pid]);
  if (process.platform === 'linux') {
    assert.ok(info.processStartTicks > 0n);
    assert.equal(info.pidNamespace, statSync('/proc/self/ns/pid', { bigint: true }).ino);
  }
  const unwatched = clientInfo(false);
  assert.deepEqual([unwatched.processStartTicks, unwatched.pidNamespace], [0n, 0n]);
});

test('the clock only goes forward, and counts as the system does', () => {
  const clock = new SystemClock();
  const other = new SystemClock();
  let last = clock.nowMs();
  for (let n = 0; n < 10_000; n += 1) {
    const now = clock.nowMs();
    assert.ok(Number.isInteger(now) && now >= last);
    last = now;
  }
  assert.ok(Math.abs(clock.nowMs() - other.nowMs()) <= 1_000);
});

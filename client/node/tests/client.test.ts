/** A whole client, with a puppet for a sidecar in the same process. */

import assert from 'node:assert/strict';
import { setImmediate as turn } from 'node:timers/promises';
import { test } from 'node:test';
import {
  AnarchonClient,
  AnarchonError,
  ClientError,
  credentials,
  every,
  JobError,
  NotConfirmedError,
  RefusedError,
  SessionReplacedError,
  type ClientOptions,
  type Context,
  type Jobs,
} from '../src/index';
import { FakeSidecar } from '../src/testing';
import { CancelReason, ReceiptStatus } from '../src/v1';
import { MemoryLogger } from './memory_logger';

class Stage {
  readonly sidecar = new FakeSidecar({ sessionTtl: '15s', keepAliveInterval: '5s' });
  readonly logger = new MemoryLogger();
  readonly client: AnarchonClient;

  constructor(options: ClientOptions = {}) {
    const { sidecar: transport, logger } = this;
    this.client = new AnarchonClient({ transport, logger, random: () => 0, ...options });
  }

  async subscribed(jobs: Jobs) {
    const subscription = this.client.subscribe(jobs);
    assert.equal(await subscription.ready, 'fake:1');
    return subscription;
  }
}

const untilTold = (ctx: Context) => ctx.sleep('366d');
const hourly = (handler: (ctx: Context) => unknown) => ({ sync: every('1h', handler) });

test('a run is handed out, done, reported; and the client leaves politely', async () => {
  const { sidecar, client, logger } = new Stage();
  const subscription = client.subscribe(hourly((ctx) => `did ${ctx.payload.toString()}`));
  assert.equal(await subscription.ready, 'fake:1');
  const [request] = sidecar.subscribes;
  assert.equal(request?.sessionId, subscription.sessionId);
  assert.equal(request.client?.language, 'node');
  assert.equal(request.client.processId, process.pid);
  assert.equal(request.maxConcurrency, 100);
  const { result, elapsed } = await sidecar.assign('sync', { payload: 'it' }).outcome;
  assert.deepEqual(result.case === 'success' && result.value.result, 'did it');
  assert.ok(elapsed);
  await subscription.stop();
  assert.equal(sidecar.keepAlives.at(-1)?.draining, true);
  assert.equal(sidecar.closes.length, 1);
  await subscription.closed;
  assert.equal(logger.lines[0], 'info: attached to instance fake:1');
  assert.equal(logger.lines.length, 1);
});

test('a logger that throws, or rejects, ends neither handlers nor the process', async (t) => {
  const said: string[] = [];
  t.mock.method(console, 'error', (line: string) => said.push(line));
  const full = () => {
    throw new Error('the disk is full');
  };
  const rejected: () => unknown = () => Promise.reject(new Error('the collector is away'));
  const stage = new Stage({ logger: { info: full, warn: full, error: rejected } });
  const subscription = await stage.subscribed(
    hourly((ctx) => {
      ctx.log.info('begins');
      throw new Error('no');
    }),
  );
  const { result } = await stage.sidecar.assign('sync').outcome;
  assert.equal(result.case === 'failure' && result.value.message, 'no');
  await stage.sidecar.assign('sync').outcome; // it is handed out and goes on as before
  await subscription.stop();
  assert.equal(said[0], 'anarchon: warning: the logger has failed: Error: the disk is full');
  assert.equal(said[1], 'anarchon: attached to instance fake:1');
  assert.ok(said.some((line) => /^anarchon: sync .*: begins$/.test(line)));
  const later = said.indexOf(
    'anarchon: warning: the logger has failed: Error: the collector is away',
  );
  assert.match(said[later + 1] ?? '', /^anarchon: error: sync .*: failed: Error: no/);
});

test('ticks and keep-alives go on by themselves', async () => {
  const { sidecar, client } = new Stage();
  sidecar.keepAliveInterval = '200ms';
  const subscription = client.subscribe(hourly(() => 1));
  await sidecar.waitFor(() => sidecar.keepAlives.length >= 3);
  await subscription.stop();
});

test('confirm() asks the sidecar', async () => {
  const stage = new Stage();
  const answers: unknown[] = [];
  const subscription = await stage.subscribed(
    hourly((ctx) =>
      ctx.confirm().then(
        () => answers.push('confirmed'),
        (error: unknown) => answers.push(error),
      ),
    ),
  );
  const first = stage.sidecar.assign('sync');
  await first.outcome;
  assert.deepEqual(stage.sidecar.keepAlives.at(-1)?.confirm, [first.token]);
  stage.sidecar.canConfirm = false;
  await stage.sidecar.assign('sync').outcome;
  assert.equal(answers[0], 'confirmed');
  assert.ok(answers[1] instanceof NotConfirmedError);
  await subscription.stop();
});

test('a cancellation reaches the signal, and Stopped is reported', async () => {
  const stage = new Stage();
  const subscription = await stage.subscribed(hourly(untilTold));
  const run = stage.sidecar.assign('sync');
  await turn();
  stage.sidecar.cancel(run, 'superseded');
  const { result } = await run.outcome;
  assert.equal(result.case === 'stopped' && result.value.reason, CancelReason.SUPERSEDED);
  await subscription.stop();
});

test('a listener of the signal may stop the client', async () => {
  const stage = new Stage();
  const subscription = await stage.subscribed(
    hourly((ctx) => {
      ctx.signal.addEventListener('abort', () => void subscription.stop('0s'));
      return untilTold(ctx);
    }),
  );
  const run = stage.sidecar.assign('sync');
  await turn();
  stage.sidecar.cancel(run);
  await subscription.closed;
  assert.equal((await run.outcome).result.case, 'stopped');
});

test('s16 s17 trust that ends, and an attempt that is lost, are told', async () => {
  const stage = new Stage();
  const subscription = await stage.subscribed(hourly(untilTold));
  stage.sidecar.keepAliveInterval = '200ms';
  const lost = stage.sidecar.assign('sync');
  await stage.sidecar.waitFor(() => stage.sidecar.keepAlives.at(-1)?.inFlight.includes(lost.token));
  stage.sidecar.lose(lost);
  const fenced = (await lost.outcome).result;
  assert.equal(fenced.case === 'stopped' && fenced.value.reason, CancelReason.FENCED);
  const run = stage.sidecar.assign('sync');
  await turn();
  stage.sidecar.sessionTtl = '300ms';
  await stage.sidecar.waitFor(() => stage.sidecar.keepAlives.at(-1)?.inFlight.includes(run.token));
  stage.sidecar.isSilent = true;
  const { result } = await run.outcome;
  assert.equal(result.case === 'stopped' && result.value.reason, CancelReason.LEASE_LOST);
  await subscription.stop();
});

test('s24 s26 a stream that breaks, and a sidecar that comes back, are subscribed to again', async () => {
  const stage = new Stage();
  let release = (): void => undefined;
  const released = new Promise<void>((resolve) => (release = resolve));
  const subscription = await stage.subscribed(hourly(() => released.then(() => 'done')));
  const run = stage.sidecar.assign('sync');
  stage.sidecar.goAway();
  await turn();
  stage.sidecar.comeBack();
  await stage.sidecar.waitFor(() => stage.sidecar.keepAlives.at(-1)?.inFlight.includes(run.token));
  assert.deepEqual(stage.sidecar.subscribes.at(-1)?.inFlight, [run.token]);
  stage.sidecar.breakStream();
  const { length } = stage.sidecar.subscribes;
  await stage.sidecar.waitFor(() => stage.sidecar.subscribes.length > length);
  release();
  assert.equal((await run.outcome).result.case, 'success');
  await subscription.stop();
  const said = stage.logger.text;
  assert.match(
    said,
    /warn: the stream was broken by the test; subscribing again until that succeeds/,
  );
  assert.match(said, /info: attached again, to instance fake:1/);
});

test('a result that the store cannot take now is repeated', async () => {
  const stage = new Stage();
  const subscription = await stage.subscribed(hourly(() => 'done'));
  stage.sidecar.receipt = ReceiptStatus.STORE_UNAVAILABLE;
  const run = stage.sidecar.assign('sync');
  await stage.sidecar.waitFor(() => stage.sidecar.results.length >= 2);
  stage.sidecar.receipt = ReceiptStatus.RECORDED;
  await run.outcome;
  await subscription.stop();
});

test('s23 stop lets handlers finish for the grace, and a shorter one cancels them', async () => {
  const stage = new Stage();
  const subscription = await stage.subscribed(hourly(untilTold));
  const run = stage.sidecar.assign('sync');
  await turn();
  const stopped = stage.client.stop('1h');
  assert.equal(subscription.isStopping, true);
  await subscription.stop('0s');
  await stopped;
  const { result } = await run.outcome;
  assert.equal(result.case === 'stopped' && result.value.reason, CancelReason.SHUTDOWN);
  assert.match(stage.logger.text, /info: stopping: waiting up to 1h for 1 handler \(sync\)/);
  await assert.rejects(subscription.stop('1 hour'), ClientError);
});

test('a handler that goes on after the client has stopped is told that nobody renews', async () => {
  const stage = new Stage();
  let lost: AbortSignal | undefined;
  const handler = (ctx: Context) => {
    lost = ctx.lostSignal;
    return new Promise(() => undefined);
  };
  const subscription = await stage.subscribed({
    sync: every('1h', handler, { cancelGrace: '0s' }),
  });
  stage.sidecar.assign('sync');
  await turn();
  assert.equal(lost?.aborted, false);
  await subscription.stop('0s');
  assert.equal(lost.aborted, true);
});

test('a stream that is of no use any more is ended, and at the end the transport is let go', async () => {
  const stage = new Stage();
  const { sidecar } = stage;
  const open = new Set<number>();
  let closed = 0;
  let streams = 0;
  const subscribe = sidecar.subscribe.bind(sidecar);
  sidecar.subscribe = (request, listener) => {
    streams += 1;
    const stream = streams;
    const end = subscribe(request, listener);
    open.add(stream);
    return () => {
      open.delete(stream);
      end();
    };
  };
  sidecar.close = () => (closed += 1);
  sidecar.keepAliveInterval = '200ms';
  const subscription = await stage.subscribed(hourly(() => 1));
  sidecar.forgetSession();
  await sidecar.waitFor(() => sidecar.subscribes.length === 2);
  assert.deepEqual([...open], [2]);
  await subscription.stop();
  assert.deepEqual([[...open], closed], [[], 1]);
});

test('what the sidecar refuses is thrown by ready and closed, and not logged then', async () => {
  const stage = new Stage();
  const error = new RefusedError('job sync: no');
  stage.sidecar.refuse(error);
  const subscription = stage.client.subscribe(hourly(() => 1));
  await assert.rejects(subscription.ready, error);
  await assert.rejects(subscription.closed, error);
  await assert.rejects(subscription.stop(), error);
  await stage.client.stop();
  assert.equal(stage.logger.text, '');
  const listening = () => [process.listenerCount('SIGINT'), process.listenerCount('SIGTERM')];
  const before = listening();
  await assert.rejects(stage.client.run(hourly(() => 1)), error);
  assert.deepEqual(listening(), before);
});

test('an error that nobody waits for is logged, and ends nothing else', async () => {
  const stage = new Stage();
  const subscription = await stage.subscribed(hourly(() => 1));
  stage.sidecar.replaceSession();
  await turn();
  assert.match(stage.logger.text, /error: the client stops: another stream took over/);
  await assert.rejects(subscription.closed, SessionReplacedError);
  assert.equal(stage.sidecar.closes.length, 0);
});

test('an error of our own leaves no question open, and is logged with what is behind it', async () => {
  const stage = new Stage();
  let answer: unknown;
  const ended = new Promise<void>((resolve) => {
    stage
      .subscribed(
        hourly(async (ctx) => {
          stage.sidecar.keepAlive = () => {
            throw new TypeError('a mistake');
          };
          await ctx.confirm().catch((error: unknown) => (answer = error));
          resolve();
        }),
      )
      .then(
        () => stage.sidecar.assign('sync'),
        () => undefined,
      );
  });
  await ended;
  assert.ok(answer instanceof NotConfirmedError);
  assert.match(stage.logger.text, /error: the client stops: [^]*TypeError: a mistake/);
});

test('stopped before it was ready: ready says so', async () => {
  const stage = new Stage();
  stage.sidecar.goAway();
  const subscription = stage.client.subscribe(hourly(() => 1));
  const { ready } = subscription;
  await subscription.stop();
  await assert.rejects(ready, AnarchonError);
});

test('a client can be subscribed several times, each a session of its own', async () => {
  const clients = [new Stage(), new Stage()];
  const ids = await Promise.all(
    clients.map(async (stage) => {
      const { sessionId } = await stage.subscribed(hourly(() => 1));
      await stage.client.stop();
      return sessionId;
    }),
  );
  assert.notEqual(ids[0], ids[1]);
  for (const id of ids) assert.match(id, /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/);
});

test('what is set up wrongly is said at once', () => {
  const cases: [ClientOptions, string][] = [
    [{ maxConcurrency: 0 }, 'maxConcurrency 0: must be a whole number from 1 to 10,000'],
    [{ maxConcurrency: 1.5 }, 'maxConcurrency 1.5'],
    [{ stopGrace: '5' }, "stopGrace '5': a number needs its unit"],
    [{ onLeaseLost: 'ignore' as 'cancel' }, "onLeaseLost 'ignore': must be 'cancel' or 'exit'"],
    [{ address: 'nowhere' }, 'address \'nowhere\': must be "host:port"'],
    [{ address: '10.0.0.1:7420' }, 'is not on this machine, so calls to it need TLS'],
    [
      { address: '10.0.0.1:7420', credentials: credentials.createInsecure() },
      'is not on this machine, so calls to it need TLS',
    ],
    [{ address: 'unix:relative' }, 'must be unix:/absolute/path'],
    [{ address: 'unix://host/path' }, 'must be unix:/absolute/path'],
    [{ address: `unix:/${'x'.repeat(107)}` }, "a socket's path has at most 107 bytes"],
    [{ address: 'localhost:0' }, 'must be "host:port"'],
    [{ address: '[::2]:7420' }, 'is not on this machine'],
  ];
  for (const [options, message] of cases) {
    assert.throws(
      () => new AnarchonClient(options),
      (error: Error) => error instanceof ClientError && error.message.includes(message),
      message,
    );
  }
  for (const address of ['127.8.8.8:1', '[::1]:7420', 'localhost:7420', 'unix:///a', 'unix:/a']) {
    assert.ok(new AnarchonClient({ address }));
    assert.ok(new AnarchonClient({ address, credentials: credentials.createInsecure() }));
  }
  assert.ok(new AnarchonClient({ address: '10.0.0.1:1', credentials: credentials.createSsl() }));
  assert.throws(() => new AnarchonClient().subscribe({}), JobError);
  const client = new AnarchonClient({ tokenFile: '/nowhere/token' });
  assert.throws(() => client.subscribe(hourly(() => 1)), /token file '\/nowhere\/token': ENOENT/);
});

/** The calls of a session over gRPC, to a server that answers as the test says. */

import { create } from '@bufbuild/protobuf';
import * as grpc from '@grpc/grpc-js';
import assert from 'node:assert/strict';
import { chmodSync, mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test, type TestContext } from 'node:test';
import { inspect } from 'node:util';
import { AdminClient, AnarchonClient, every } from '../src/index';
import {
  CredentialsError,
  errorFromStatus,
  NotFoundError,
  RefusedError,
  SessionNotFoundError,
  SessionReplacedError,
  SidecarUnavailableError,
  UnsupportedError,
  VersionError,
  type SidecarError,
} from '../src/errors';
import {
  CompleteRequestSchema,
  KeepAliveRequestSchema,
  SessionService,
  SubscribeRequestSchema,
  type SubscribeResponse,
} from '../src/generated/anarchon/v1/session_pb';
import { Endpoint, GrpcTransport, type EndpointOptions } from '../src/transport';
import { MemoryLogger } from './memory_logger';
import { PuppetServer, status } from './puppet_server';

const logger = new MemoryLogger();
const keepAlive = create(KeepAliveRequestSchema, { sessionId: 'session' });

async function serving(t: TestContext, server: PuppetServer, address?: string) {
  await server.start(address);
  t.after(() => server.stop());
  return server;
}

function transportTo(t: TestContext, options: EndpointOptions): GrpcTransport {
  const transport = new GrpcTransport(new Endpoint(options), logger);
  t.after(() => transport.close());
  return transport;
}

function folder(t: TestContext): string {
  const path = mkdtempSync(join(tmpdir(), 'anarchon-'));
  t.after(() => rmSync(path, { recursive: true }));
  return path;
}

/** The events of a stream, and then its end. */
function read(transport: GrpcTransport) {
  const events: SubscribeResponse[] = [];
  let cancel = (): void => undefined;
  const ended = new Promise<SidecarError>((resolve) => {
    cancel = transport.subscribe(create(SubscribeRequestSchema), {
      event: (event) => events.push(event),
      ended: resolve,
    });
  });
  return { events, ended, cancel: () => cancel() };
}

test('a status becomes the error of its reason, else of its code', () => {
  const cases = [
    ['NOT_FOUND', 'SESSION_NOT_FOUND', SessionNotFoundError],
    ['ABORTED', 'SESSION_REPLACED', SessionReplacedError],
    ['NOT_FOUND', 'JOB_NOT_FOUND', NotFoundError],
    ['NOT_FOUND', '', NotFoundError],
    ['RESOURCE_EXHAUSTED', 'LIMIT_EXCEEDED', RefusedError],
    ['RESOURCE_EXHAUSTED', '', SidecarUnavailableError],
    ['FAILED_PRECONDITION', 'UNSUPPORTED', UnsupportedError],
    ['FAILED_PRECONDITION', 'VERSION', VersionError],
    ['FAILED_PRECONDITION', 'RUN_FINAL', RefusedError],
    ['INVALID_ARGUMENT', 'INVALID_FIELD', RefusedError],
    ['UNIMPLEMENTED', '', VersionError],
    ['UNAUTHENTICATED', 'BAD_CREDENTIALS', CredentialsError],
    ['PERMISSION_DENIED', '', CredentialsError],
    ['UNAVAILABLE', 'STORE_UNAVAILABLE', SidecarUnavailableError],
    ['ABORTED', 'THE_MOON_IS_FULL', SidecarUnavailableError],
  ] as const;
  for (const [code, reason, kind] of cases) {
    const error = errorFromStatus(code, reason, 'its words');
    assert.equal(error.constructor, kind, `${code} ${reason}`);
    assert.deepEqual([error.message, error.reason], ['its words', reason]);
  }
  assert.equal(errorFromStatus('INTERNAL', '', '').message, 'INTERNAL');
});

test('what a server refuses comes in its own words, by the trailer', async (t) => {
  const { address } = await serving(
    t,
    PuppetServer.polite({
      keepAlive: (_, callback) =>
        callback(status(grpc.status.NOT_FOUND, 'who?', 'SESSION_NOT_FOUND')),
      subscribe: (call) =>
        call.emit('error', status(grpc.status.FAILED_PRECONDITION, 'not here', 'UNSUPPORTED')),
    }),
  );
  const transport = transportTo(t, { address });
  await assert.rejects(transport.keepAlive(keepAlive, 10_000), (error: SidecarError) => {
    assert.ok(error instanceof SessionNotFoundError);
    assert.deepEqual([error.message, error.reason], ['who?', 'SESSION_NOT_FOUND']);
    return true;
  });
  const error = await read(transport).ended;
  assert.ok(error instanceof UnsupportedError, error.message);
});

test('an absent sidecar is said with what to do, and once in the log; it may come later', async (t) => {
  const gone = await PuppetServer.polite().start();
  gone.stop();
  const { address } = gone;
  const quiet = new MemoryLogger();
  const transport = new GrpcTransport(new Endpoint({ address }), quiet);
  t.after(() => transport.close());
  const stream = read(transport);
  await assert.rejects(transport.keepAlive(keepAlive, 10_000), (error: SidecarError) => {
    assert.ok(error instanceof SidecarUnavailableError);
    assert.equal(
      error.message,
      `no sidecar answers at ${address}; start one with \`anarchon serve\`, or give the address of another`,
    );
    return true;
  });
  const reported = transport.complete(create(CompleteRequestSchema), 60_000); // waits for it
  let attached = (): void => undefined;
  const isAttached = new Promise<void>((resolve) => (attached = resolve));
  await serving(t, PuppetServer.polite({ subscribe: () => attached() }), address);
  await isAttached;
  await reported;
  assert.equal(
    quiet.text,
    `warn: no sidecar answers at ${address}; start one with \`anarchon serve\`, or give the address of another; trying again until one answers`,
  );
  stream.cancel();
});

test('a sidecar that does not answer in time, and one that does not speak anarchon.v1', async (t) => {
  const { address } = await serving(t, PuppetServer.polite({ keepAlive: () => undefined }));
  await assert.rejects(
    transportTo(t, { address }).keepAlive(keepAlive, 50),
    /the sidecar at .* did not answer in time/,
  );
  const other = await serving(t, new PuppetServer(SessionService, {}));
  await assert.rejects(transportTo(t, { address: other.address }).keepAlive(keepAlive, 10_000), {
    name: 'VersionError',
    message: /does not speak anarchon\.v1/,
  });
});

test('a stream that its server ends, and a connection that is lost, are no refusal', async (t) => {
  const server = await serving(t, PuppetServer.polite({ subscribe: (call) => call.end() }));
  const ended = await read(transportTo(t, { address: server.address })).ended;
  assert.equal(ended.message, 'the sidecar ended the stream');
  const dropping = PuppetServer.polite({
    subscribe: (call) => call.emit('error', status(grpc.status.UNAVAILABLE, 'Connection dropped')),
  });
  const { address } = await serving(t, dropping);
  const lost = await read(transportTo(t, { address })).ended;
  assert.ok(lost instanceof SidecarUnavailableError);
  assert.equal(
    lost.message,
    `the connection to the sidecar at ${address} is lost: Connection dropped`,
  );
});

test('the call token goes with every call, and is read again when its file changes', async (t) => {
  const server = await serving(t, PuppetServer.polite());
  const tokenFile = join(folder(t), 'token');
  writeFileSync(tokenFile, '\n  first \nsecond\n');
  const transport = transportTo(t, { address: server.address, tokenFile });
  const sent = async () => {
    await transport.keepAlive(keepAlive, 10_000);
    return server.calls.at(-1)?.metadata.get('authorization');
  };
  assert.deepEqual(await sent(), ['Bearer first']);
  writeFileSync(`${tokenFile}.new`, 'second');
  renameSync(`${tokenFile}.new`, tokenFile);
  assert.deepEqual(await sent(), ['Bearer second']);
  rmSync(tokenFile);
  assert.deepEqual(await sent(), ['Bearer second']);
  assert.match(
    logger.lines.at(-1) ?? '',
    /warn: the call token stays as it was: token file .*ENOENT/,
  );
  for (const bad of ['', 'two words', 'x'.repeat(4_097), 'ümlaut']) {
    writeFileSync(tokenFile, bad);
    assert.throws(() => transportTo(t, { address: server.address, tokenFile }), /printable ASCII/);
  }
});

test('a client that is logged does not show its call token', async (t) => {
  const tokenFile = join(folder(t), 'token');
  writeFileSync(tokenFile, 'secret-7');
  const { address } = await serving(t, PuppetServer.polite());
  const admin = new AdminClient({ address, tokenFile });
  t.after(() => admin.close());
  await assert.rejects(admin.getJob('sync'), VersionError); // a puppet has no such calls
  assert.equal(inspect(admin, { depth: Infinity, showHidden: true }).includes('secret-7'), false);
});

test('a Unix socket is called only where nobody else could have put it', async (t) => {
  const directory = folder(t);
  const address = `unix:${join(directory, 'socket')}`;
  const server = await serving(t, PuppetServer.polite(), address);
  const transport = transportTo(t, { address });
  await transport.keepAlive(keepAlive, 10_000);
  chmodSync(directory, 0o777);
  await assert.rejects(transport.keepAlive(keepAlive, 10_000), {
    name: 'SidecarUnavailableError',
    message: /mode 0777, so it may be somebody else's/,
  });
  const client = new AnarchonClient({ address });
  assert.throws(() => client.subscribe({ sync: every('1h', () => 1) }), {
    name: 'ClientError',
    message: /nobody else may write in the directory/,
  });
  assert.equal(server.calls.length, 1);
});

test('a whole client over gRPC lets go of everything when it stops', async (t) => {
  const { address } = await serving(
    t,
    PuppetServer.polite({ closeSession: (_, callback) => callback(null, {}) }),
  );
  const client = new AnarchonClient({ address, logger });
  const subscription = client.subscribe({ sync: every('1h', () => 1) });
  assert.equal(await subscription.ready, 'puppet');
  await client.stop();
});

/**
 * How a session's calls reach the sidecar: the `Transport` interface and its gRPC form. Imports
 * grpc-js, the wire's messages and the errors.
 */

import { fromBinary, toBinary, type DescMessage, type MessageShape } from '@bufbuild/protobuf';
import * as grpc from '@grpc/grpc-js';
import { lstatSync, readFileSync, statSync } from 'node:fs';
import { isIP } from 'node:net';
import { dirname } from 'node:path';
import {
  ClientError,
  errorFromStatus,
  show,
  SidecarUnavailableError,
  type SidecarError,
} from './errors';
import {
  SessionService,
  type CloseSessionRequest,
  type CloseSessionResponse,
  type CompleteRequest,
  type CompleteResponse,
  type KeepAliveRequest,
  type KeepAliveResponse,
  type SubscribeRequest,
  type SubscribeResponse,
} from './generated/anarchon/v1/session_pb';
import type { Logger } from './logger';
import { BACKOFF_FIRST_MS, BACKOFF_MAX_MS, MESSAGE_MAX_BYTES } from './session';

const DEFAULT_ADDRESS = '127.0.0.1:7420';
/** What a socket address of the system can hold, with its closing zero. */
const UNIX_PATH_MAX_BYTES = 107;
const OTHERS_WRITE = 0o022;
const TOKEN = /^[!-~]{1,4096}$/;

/** Who listens to a stream: events, and then its end. */
export interface StreamListener {
  /** An event has come. */
  event(event: SubscribeResponse): void;
  /** The stream has ended, or could not be opened. */
  ended(error: SidecarError): void;
}

/** The calls of the protocol's SessionService. Promises are rejected with a `SidecarError`. */
export interface Transport {
  /**
   * Open the session's stream, waiting for a sidecar as long as it takes. Returns what ends it; the
   * listener hears nothing after that.
   */
  subscribe(request: SubscribeRequest, listener: StreamListener): () => void;
  /** Renew the session, without waiting for a sidecar that is not there. */
  keepAlive(request: KeepAliveRequest, timeoutMs: number): Promise<KeepAliveResponse>;
  /** Report results, waiting for a sidecar until the timeout. */
  complete(request: CompleteRequest, timeoutMs: number): Promise<CompleteResponse>;
  /** End the session. */
  closeSession(request: CloseSessionRequest, timeoutMs: number): Promise<CloseSessionResponse>;
  /** Let go of everything. */
  close(): void;
}

/** Where a sidecar is, and what opens its door; as the user gives it. */
export interface EndpointOptions {
  /**
   * `"host:port"` or `"unix:/absolute/path"`. Default: the environment's `ANARCHON_ADDRESS`, else
   * `127.0.0.1:7420`.
   */
  address?: string | undefined;
  /**
   * The file that holds the call token; read again when it changes. Default: the environment's
   * `ANARCHON_TOKEN_FILE`, else none.
   */
  tokenFile?: string | undefined;
  /**
   * For TLS, `credentials.createSsl(...)` of `@grpc/grpc-js`, which this package exports again.
   * Needed where the sidecar is on another machine.
   */
  credentials?: grpc.ChannelCredentials | undefined;
}

/** Where a sidecar is, and what opens its door; checked. */
export class Endpoint {
  readonly address: string;
  readonly tokenFile: string | undefined;
  readonly credentials: grpc.ChannelCredentials | undefined;
  private readonly isLocal: boolean;

  /** Throws `ClientError`. */
  constructor({ address, tokenFile, credentials }: EndpointOptions) {
    this.address = address || process.env['ANARCHON_ADDRESS'] || DEFAULT_ADDRESS;
    this.tokenFile = tokenFile || process.env['ANARCHON_TOKEN_FILE'] || undefined;
    this.credentials = credentials;
    this.isLocal = isLocal(this.address);
    if (!this.isLocal && credentials?._isSecure() !== true) {
      throw new ClientError(
        `address ${show(this.address)}: is not on this machine, so calls to it need TLS: give ` +
          'credentials: credentials.createSsl(...), or the address of a local sidecar',
      );
    }
  }

  /**
   * Throw `ClientError` if somebody else than the sidecar's user could have put a socket here.
   *
   * A sidecar makes its socket in a directory that belongs to its user and that nobody else may write,
   * so a socket that lies otherwise is not a sidecar's. One that is not there is no error.
   */
  checkSocket(): void {
    if (!this.address.startsWith('unix:')) return;
    const path = socketPath(this.address);
    let socket, directory;
    try {
      socket = lstatSync(path);
      directory = statSync(dirname(path));
    } catch {
      return; // nor is one that cannot be seen: connecting says what is wrong
    }
    if (socket.uid !== directory.uid || (directory.mode & OTHERS_WRITE) !== 0) {
      const mode = (directory.mode & 0o7777).toString(8).padStart(4, '0');
      throw new ClientError(
        `address ${show(this.address)}: the socket belongs to user ${socket.uid} and lies in a ` +
          `directory of user ${directory.uid}, mode ${mode}, so it may be somebody else's than the ` +
          "sidecar's: both must belong to one user, and nobody else may write in the directory",
      );
    }
  }

  /** What to say where no sidecar answers, and what to do about it. */
  get absence(): string {
    const advice = this.isLocal
      ? '; start one with `anarchon serve`, or give the address of another'
      : '';
    return `no sidecar answers at ${this.address}${advice}`;
  }

  /** A channel to the sidecar; it connects when it is first used. */
  open(): grpc.Client {
    return new grpc.Client(
      this.address.replace(/^unix:\/\/(?=\/)/, 'unix:'),
      this.credentials ?? grpc.credentials.createInsecure(),
      {
        'grpc.initial_reconnect_backoff_ms': BACKOFF_FIRST_MS,
        'grpc.min_reconnect_backoff_ms': 1_000,
        'grpc.max_reconnect_backoff_ms': BACKOFF_MAX_MS,
        'grpc.max_send_message_length': MESSAGE_MAX_BYTES,
        'grpc.max_receive_message_length': MESSAGE_MAX_BYTES,
        // A sidecar is never behind the proxy that the environment names.
        'grpc.enable_http_proxy': 0,
        'grpc.enable_retries': 0,
        'grpc.service_config_disable_resolution': 1,
        // A client's connection is its own, and goes with it.
        'grpc.use_local_subchannel_pool': 1,
      },
    );
  }

  /** What a failed call means. */
  error(status: grpc.ServiceError): SidecarError {
    const code = grpc.status[status.code];
    const [trailer] = status.metadata.get('anarchon-reason');
    const reason = trailer?.toString() ?? '';
    let message = status.details;
    if (!reason && code === 'UNIMPLEMENTED') {
      message = `the server at ${this.address} does not speak anarchon.v1: ${message}`;
    } else if (!reason && code === 'UNAVAILABLE') {
      message = this.unavailable(message);
    } else if (!reason && code === 'DEADLINE_EXCEEDED') {
      message = `the sidecar at ${this.address} did not answer in time`;
    }
    return errorFromStatus(code, reason, message);
  }

  /**
   * What gRPC says of a connection, in words for people where it is only that none was made. With
   * credentials there are more ways to fail than one, and only gRPC's words tell them apart.
   */
  private unavailable(details: string): string {
    if (!/^(No connection established|Name resolution failed)/.test(details)) {
      return `the connection to the sidecar at ${this.address} is lost: ${details}`;
    }
    return this.credentials === undefined ? this.absence : `${this.absence}: ${details}`;
  }
}

/** The token in a file, as it goes with every call. */
export class CallToken {
  private seen = '';
  /** Private to JavaScript too, so that whoever logs a client does not log this. */
  #header: string | undefined;

  /** Throws `ClientError` if the file cannot be read, or holds something else. */
  constructor(
    private readonly file: string | undefined,
    private readonly logger: Logger,
  ) {
    if (file === undefined) return;
    this.seen = stampOf(file);
    this.#header = readToken(file);
  }

  /**
   * The metadata of a call, read again if the file has changed. A file that is just being replaced
   * changes nothing: the token before goes on being used.
   */
  metadata(options: grpc.MetadataOptions): grpc.Metadata {
    if (this.file !== undefined) this.lookAgain(this.file);
    const metadata = new grpc.Metadata(options);
    if (this.#header !== undefined) metadata.set('authorization', this.#header);
    return metadata;
  }

  private lookAgain(file: string): void {
    try {
      const stamp = stampOf(file);
      if (stamp === this.seen) return;
      this.#header = readToken(file);
      this.seen = stamp;
    } catch (error) {
      this.logger.warn(`the call token stays as it was: ${(error as ClientError).message}`);
    }
  }
}

/** Calls over one channel, with the token and the checks that go with each. */
export class Caller {
  readonly client: grpc.Client;
  private readonly token: CallToken;
  private readonly calls = new Set<{ cancel(): void }>();

  /** Throws `ClientError`. */
  constructor(
    private readonly endpoint: Endpoint,
    logger: Logger,
  ) {
    this.token = new CallToken(endpoint.tokenFile, logger);
    this.client = endpoint.open();
  }

  /** Call `method`; `ended` is told how it ended. Rejected with a `SidecarError`. */
  call<I extends DescMessage, O extends DescMessage>(
    method: Method<I, O>,
    request: MessageShape<I>,
    { timeoutMs, waitForReady }: { timeoutMs: number; waitForReady: boolean },
    ended?: (status: grpc.StatusObject) => void,
  ): Promise<MessageShape<O>> {
    return new Promise((resolve, reject) => {
      const call = this.client.makeUnaryRequest(
        pathOf(method),
        serializer(method.input),
        deserializer(method.output),
        request,
        this.metadata({ waitForReady }), // where it throws, the promise is rejected
        { deadline: Date.now() + timeoutMs },
        (error, response) => {
          this.calls.delete(call);
          if (error !== null) reject(this.endpoint.error(error));
          else resolve(response as MessageShape<O>);
        },
      );
      this.calls.add(call);
      if (ended) call.on('status', ended);
    });
  }

  /** Open the stream of `method`. Throws `SidecarUnavailableError`; emits a gRPC status as an error. */
  stream<I extends DescMessage, O extends DescMessage>(
    method: Method<I, O>,
    request: MessageShape<I>,
    options: grpc.MetadataOptions,
  ): grpc.ClientReadableStream<MessageShape<O>> {
    const call = this.client.makeServerStreamRequest(
      pathOf(method),
      serializer(method.input),
      deserializer(method.output),
      request,
      this.metadata(options),
    );
    this.calls.add(call);
    call.on('status', () => this.calls.delete(call));
    return call;
  }

  /** What goes with every call, if what listens may be told it. Throws `SidecarUnavailableError`. */
  metadata(options: grpc.MetadataOptions): grpc.Metadata {
    try {
      this.endpoint.checkSocket();
    } catch (error) {
      throw new SidecarUnavailableError((error as ClientError).message);
    }
    return this.token.metadata(options);
  }

  /** Let go of the channel, and of what is under way. */
  close(): void {
    for (const call of this.calls) call.cancel();
    this.client.close();
  }
}

/** The calls of a session over one gRPC channel. */
export class GrpcTransport implements Transport {
  private readonly caller: Caller;
  private readonly streams = new Set<() => void>();
  private absenceTold = false;

  /** Throws `ClientError`. */
  constructor(
    private readonly endpoint: Endpoint,
    private readonly logger: Logger,
  ) {
    this.caller = new Caller(endpoint, logger);
  }

  /** See `Transport`. Says once, in the log, that there is no sidecar yet. */
  subscribe(request: SubscribeRequest, listener: StreamListener): () => void {
    let call: grpc.ClientReadableStream<SubscribeResponse> | undefined;
    const end = () => {
      this.streams.delete(end);
      call?.cancel();
    };
    const isOver = () => !this.streams.has(end);
    const ended = (error: SidecarError) => {
      if (isOver()) return;
      this.streams.delete(end);
      listener.ended(error);
    };
    this.streams.add(end);
    this.reach(isOver, () => {
      try {
        const { subscribe } = SessionService.method;
        call = this.caller.stream(subscribe, request, { waitForReady: true });
      } catch (error) {
        ended(error as SidecarUnavailableError);
        return;
      }
      call.on('data', (event: SubscribeResponse) => {
        if (!isOver()) listener.event(event);
      });
      call.on('end', () => ended(new SidecarUnavailableError('the sidecar ended the stream')));
      call.on('error', (error: grpc.ServiceError) => ended(this.endpoint.error(error)));
    });
    return end;
  }

  /** See `Transport`. */
  keepAlive(request: KeepAliveRequest, timeoutMs: number): Promise<KeepAliveResponse> {
    const options = { timeoutMs, waitForReady: false };
    return this.caller.call(SessionService.method.keepAlive, request, options);
  }

  /** See `Transport`. */
  complete(request: CompleteRequest, timeoutMs: number): Promise<CompleteResponse> {
    const options = { timeoutMs, waitForReady: true };
    return this.caller.call(SessionService.method.complete, request, options);
  }

  /** See `Transport`. */
  closeSession(request: CloseSessionRequest, timeoutMs: number): Promise<CloseSessionResponse> {
    const options = { timeoutMs, waitForReady: false };
    return this.caller.call(SessionService.method.closeSession, request, options);
  }

  /** See `Transport`. */
  close(): void {
    for (const end of this.streams) end();
    this.caller.close();
  }

  /** Wait for the connection, and say once that one has to wait; so the token sent is a fresh one. */
  private reach(isOver: () => boolean, then: () => void): void {
    if (isOver()) return;
    const channel = this.caller.client.getChannel();
    const state = channel.getConnectivityState(true);
    if (state === grpc.connectivityState.READY) {
      this.absenceTold = true;
      then();
      return;
    }
    if (state === grpc.connectivityState.TRANSIENT_FAILURE && !this.absenceTold) {
      this.absenceTold = true;
      this.logger.warn(`${this.endpoint.absence}; trying again until one answers`);
    }
    channel.watchConnectivityState(state, Infinity, () => this.reach(isOver, then));
  }
}

// ── Parts ───────────────────────────────────────────────────────────────────────────────────────

/** A method of a generated service, as far as a call needs it. */
export interface Method<I extends DescMessage, O extends DescMessage> {
  readonly name: string;
  readonly parent: { readonly typeName: string };
  readonly input: I;
  readonly output: O;
}

function pathOf(method: Method<DescMessage, DescMessage>): string {
  return `/${method.parent.typeName}/${method.name}`;
}

function serializer<D extends DescMessage>(schema: D): (message: MessageShape<D>) => Buffer {
  return (message) => Buffer.from(toBinary(schema, message));
}

function deserializer<D extends DescMessage>(schema: D): (bytes: Buffer) => MessageShape<D> {
  return (bytes) => fromBinary(schema, bytes);
}

/** Which file it is, and what state it is in. Throws `ClientError`. */
function stampOf(file: string): string {
  try {
    const { ino, mtimeNs, size } = statSync(file, { bigint: true });
    return `${ino} ${mtimeNs} ${size}`;
  } catch (error) {
    throw new ClientError(`token file ${show(file)}: ${(error as Error).message}`);
  }
}

/** The header that the token in a file makes. Throws `ClientError`. */
function readToken(file: string): string {
  let text: string;
  try {
    text = readFileSync(file, 'latin1');
  } catch (error) {
    throw new ClientError(`token file ${show(file)}: ${(error as Error).message}`);
  }
  // The sidecar's own file may hold two while one replaces the other: the first is sent.
  const token = text
    .split('\n')
    .map((line) => line.trim())
    .find((line) => line !== '');
  if (token === undefined || !TOKEN.test(token)) {
    throw new ClientError(
      `token file ${show(file)}: must begin with one line of printable ASCII without spaces`,
    );
  }
  return `Bearer ${token}`;
}

function socketPath(address: string): string {
  return address.replace(/^unix:(\/\/)?/, '');
}

/** Whether `address` is on this machine. Throws `ClientError` for what is no address. */
function isLocal(address: string): boolean {
  const what = `address ${show(address)}`;
  if (address.startsWith('unix:')) {
    const path = socketPath(address);
    if (!path.startsWith('/')) throw new ClientError(`${what}: must be unix:/absolute/path`);
    if (Buffer.byteLength(path) > UNIX_PATH_MAX_BYTES) {
      throw new ClientError(`${what}: a socket's path has at most ${UNIX_PATH_MAX_BYTES} bytes`);
    }
    return true;
  }
  const match = /^(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})$/.exec(address);
  const port = Number(match?.[3]);
  if (match === null || port < 1 || port > 65_535) {
    throw new ClientError(
      `${what}: must be "host:port" such as "${DEFAULT_ADDRESS}", or "unix:/path"`,
    );
  }
  const host = match[1] ?? match[2] ?? '';
  if (isIP(host) === 4) return host.startsWith('127.');
  return host === 'localhost' || host === '::1' || /^(0+:){7}0*1$/.test(host);
}

/** `AdminClient`: what people and tools ask a running sidecar. Imports the rest of the client. */

import {
  create,
  toBinary,
  type DescMessage,
  type MessageInitShape,
  type MessageShape,
} from '@bufbuild/protobuf';
import { timestampFromDate } from '@bufbuild/protobuf/wkt';
import type * as grpc from '@grpc/grpc-js';
import { randomUUID } from 'node:crypto';
import { ClientError, show, SidecarUnavailableError } from './errors';
import {
  AdminService,
  type Instance,
  type Job as AdminJob,
} from './generated/anarchon/v1/admin_pb';
import type { Run, RunState } from './generated/anarchon/v1/run_pb';
import { namedSpec, Job } from './jobs';
import { guarded, stderrLogger, type Logger } from './logger';
import { RunWatch } from './run_watch';
import { MESSAGE_MAX_BYTES } from './session';
import { Caller, Endpoint, type EndpointOptions, type Method } from './transport';

const TIMEOUT_MS = 10_000;
const PAGE_MAX = 500;
const PAYLOAD_MAX_BYTES = 64 * 1_024;
const REASON_MAX_BYTES = 1_024;
const REQUEST_ID_MAX_BYTES = 128;

/** What `AdminClient` takes; as `AnarchonClient` takes it. */
export interface AdminOptions extends EndpointOptions {
  /** Where to log. Default: standard error. */
  logger?: Logger | undefined;
}

/** Which runs `AdminClient.listRuns` is to give. What is left out means all. */
export interface ListRunsOptions {
  /** Only of this job. */
  job?: string | undefined;
  /** Only in these states. */
  states?: readonly RunState[] | undefined;
  /** Only with an attempt by this instance. */
  instanceId?: string | undefined;
  /** Only slots at or after this one, in milliseconds since the epoch. */
  fromSlot?: number | undefined;
  /** Only slots before this one, in milliseconds since the epoch. */
  untilSlot?: number | undefined;
  /** No more than so many, at least 1. */
  limit?: number | undefined;
}

/** Which runs `AdminClient.watchRuns` is to watch. What is left out means all. */
export interface WatchRunsOptions {
  /** Only of this job. */
  job?: string | undefined;
  /** Only slots at or after this one, in milliseconds since the epoch. */
  fromSlot?: number | bigint | undefined;
  /** Only slots before this one, in milliseconds since the epoch. */
  untilSlot?: number | bigint | undefined;
  /** Ends the watch when it is aborted; its reason is what is thrown then. */
  signal?: AbortSignal | undefined;
}

/**
 * Asks the sidecar about jobs, runs and instances of its whole namespace. Answers are the protocol's
 * own messages (`anarchon/v1`). Each call has 10 s, and is not repeated; a watch goes on until it is
 * ended.
 *
 * Methods throw `SidecarUnavailableError` where no sidecar answers, `NotFoundError` for what there is
 * not, `UnsupportedError` for what its backend cannot do, `RefusedError` for a bad argument, and
 * `ClientError` for one that cannot even be sent.
 */
export class AdminClient {
  /** Where the sidecar is. */
  readonly address: string;
  private readonly caller: Caller;
  private readonly endpoint: Endpoint;
  private readonly timeoutMs = TIMEOUT_MS;
  private lastScope = '';

  /** Throws `ClientError` for what is set up wrongly. */
  constructor(options: AdminOptions = {}) {
    this.endpoint = new Endpoint(options);
    this.endpoint.checkSocket();
    this.address = this.endpoint.address;
    this.caller = new Caller(this.endpoint, guarded(options.logger ?? stderrLogger));
  }

  /**
   * What the last answer of a call covers: empty for the whole namespace, `instance=ID` for what that
   * instance knows of itself, as its store keeps no history. Watches do not change it.
   */
  get scope(): string {
    return this.lastScope;
  }

  /** All jobs, by name; pages are fetched as they are needed. */
  async *listJobs(): AsyncGenerator<AdminJob, void> {
    const { listJobs } = AdminService.method;
    for (let pageToken = ''; ;) {
      const page = await this.call(listJobs, { pageSize: PAGE_MAX, pageToken });
      yield* page.jobs;
      pageToken = page.nextPageToken;
      if (pageToken === '') return;
    }
  }

  /** One job. */
  async getJob(job: string): Promise<AdminJob> {
    return must((await this.call(AdminService.method.getJob, { job })).job);
  }

  /**
   * Stop running the job's slots everywhere; gives the job as it is now. Once it has returned no slot
   * of the job is claimed. What runs goes on, and so do triggered runs. Pausing twice changes nothing.
   */
  async pauseJob(job: string, { reason = '' }: { reason?: string } = {}): Promise<AdminJob> {
    checkSize('reason', reason, REASON_MAX_BYTES);
    return must((await this.call(AdminService.method.pauseJob, { job, reason })).job);
  }

  /**
   * Run the job's slots again, from now on; gives the job as it is now. Slots that fell due meanwhile
   * are recorded as skipped, in one row.
   */
  async resumeJob(job: string): Promise<AdminJob> {
    return must((await this.call(AdminService.method.resumeJob, { job })).job);
  }

  /**
   * Make a run of the job that is due now, outside the schedule; gives it.
   *
   * `payload` (at most 64 KiB; texts as UTF-8) is handed to the handler. The same `requestId` gives the
   * same run, with the payload of the first call; by default one is drawn for each call, and a call that
   * failed may be repeated with its own id only. The run is skipped where the job's overlap policy is `skip` and another run is unfinished.
   */
  async triggerRun(
    job: string,
    options: { payload?: Uint8Array | string; requestId?: string } = {},
  ): Promise<Run> {
    const { payload = '', requestId = randomUUID() } = options;
    checkSize('payload', payload, PAYLOAD_MAX_BYTES);
    checkSize('requestId', requestId, REQUEST_ID_MAX_BYTES);
    const bytes = typeof payload === 'string' ? Buffer.from(payload) : payload;
    const request = { job, payload: bytes, requestId };
    return must((await this.call(AdminService.method.triggerRun, request)).run);
  }

  /**
   * Ask a run to stop; gives it as it is now. One that no instance runs ends at once. The reason is
   * handed to the handler, and kept with the run (`cancelMessage`). `RefusedError` for a run that has
   * ended.
   */
  async cancelRun(
    job: string,
    slot: number | bigint,
    { reason = '' }: { reason?: string } = {},
  ): Promise<Run> {
    checkSize('reason', reason, REASON_MAX_BYTES);
    const request = { job, slot: slotOf('slot', slot), reason };
    return must((await this.call(AdminService.method.cancelRun, request)).run);
  }

  /**
   * The next `count` slots (1 to 1,000; default 10) after `after` (default: now), in milliseconds since
   * the epoch. `job` is the name of a registered job, or any job.
   */
  async previewSlots(
    job: string | Job,
    { after, count = 10 }: { after?: Date; count?: number } = {},
  ): Promise<number[]> {
    const answer = await this.call(AdminService.method.previewSlots, {
      of:
        job instanceof Job ? { case: 'spec', value: namedSpec(job) } : { case: 'job', value: job },
      count,
      ...(after && { afterTime: timestampFromDate(after) }),
    });
    return answer.slots.map(Number);
  }

  /** Runs, newest slot first; pages are fetched as they are needed. */
  async *listRuns(options: ListRunsOptions = {}): AsyncGenerator<Run, void> {
    const { limit = Infinity, fromSlot = 0, untilSlot = 0 } = options;
    if (!(limit >= 1)) throw new ClientError(`limit ${show(limit)}: must be at least 1`);
    const request = {
      pageSize: Math.min(limit, PAGE_MAX),
      job: options.job ?? '',
      states: [...(options.states ?? [])],
      instanceId: options.instanceId ?? '',
      fromSlot: slotOf('fromSlot', fromSlot),
      untilSlot: slotOf('untilSlot', untilSlot),
    };
    let left = limit;
    for (let pageToken = ''; ;) {
      const page = await this.call(AdminService.method.listRuns, { ...request, pageToken });
      const runs = page.runs.slice(0, left);
      yield* runs;
      left -= runs.length;
      pageToken = page.nextPageToken;
      if (pageToken === '' || left <= 0) return;
    }
  }

  /**
   * Begin to watch runs: iterate over what it gives, once, with `for await`. Each run that is unfinished
   * comes, and then each as it is after a change. Changes that follow one another closely may be merged,
   * and a state may come twice, but the latest state of each run always comes; a renewed lease is no
   * change. Runs come without the stack traces of their attempts.
   *
   * When it is resolved the watch has begun: list what there is after that, and nothing falls between. It
   * goes on until the loop is left, the signal aborted or `close` called, and keeps the process alive.
   * `SidecarUnavailableError` ends it when the sidecar stops (its `reason` is `DRAINING`), or has not
   * reached its store for a minute (`STORE_UNAVAILABLE`): watch again, and list what ended meanwhile.
   */
  async watchRuns(options: WatchRunsOptions = {}): Promise<RunWatch> {
    const { job = '', fromSlot = 0, untilSlot = 0, signal } = options;
    signal?.throwIfAborted();
    const { watchRuns } = AdminService.method;
    const request = sendable(watchRuns, {
      job,
      fromSlot: slotOf('fromSlot', fromSlot),
      untilSlot: slotOf('untilSlot', untilSlot),
    });
    return RunWatch.begin(this.caller.stream(watchRuns, request, { waitForReady: false }), {
      timeoutMs: this.timeoutMs,
      signal,
      address: this.address,
      errorOf: (status) => this.endpoint.error(status),
    });
  }

  /** One run, with the stack traces of its attempts. */
  async getRun(job: string, slot: number | bigint): Promise<Run> {
    const request = { job, slot: slotOf('slot', slot) };
    return must((await this.call(AdminService.method.getRun, request)).run);
  }

  /** The instances seen lately; pages are fetched as they are needed. */
  async *listInstances(): AsyncGenerator<Instance, void> {
    const { listInstances } = AdminService.method;
    for (let pageToken = ''; ;) {
      const page = await this.call(listInstances, { pageSize: PAGE_MAX, pageToken });
      yield* page.instances;
      pageToken = page.nextPageToken;
      if (pageToken === '') return;
    }
  }

  /** One instance; by default the one that answers. */
  async getInstance(instanceId = ''): Promise<Instance> {
    return must((await this.call(AdminService.method.getInstance, { instanceId })).instance);
  }

  /** Let go of the connection. */
  close(): void {
    this.caller.close();
  }

  private async call<I extends DescMessage, O extends DescMessage>(
    method: Method<I, O>,
    fields: MessageInitShape<I>,
  ): Promise<MessageShape<O>> {
    const request = sendable(method, fields);
    const options = { timeoutMs: this.timeoutMs, waitForReady: false };
    let trailers: grpc.Metadata | undefined;
    const answer = await this.caller.call(method, request, options, ({ metadata }) => {
      trailers = metadata;
    });
    this.lastScope = decodeURIComponent(trailers?.get('anarchon-scope').join('') ?? '');
    return answer;
  }
}

/** The request of these fields. Throws `ClientError` for what no message holds. */
function sendable<I extends DescMessage, O extends DescMessage>(
  method: Method<I, O>,
  fields: MessageInitShape<I>,
): MessageShape<I> {
  const request = create(method.input, fields);
  let bytes: Uint8Array;
  try {
    bytes = toBinary(method.input, request);
  } catch (error) {
    throw new ClientError(`an argument cannot be sent: ${(error as Error).message}`);
  }
  checkSize('request', bytes, MESSAGE_MAX_BYTES);
  return request;
}

function checkSize(argument: string, value: string | Uint8Array, mostBytes: number): void {
  const bytes = Buffer.byteLength(value);
  if (bytes > mostBytes) {
    throw new ClientError(`${argument} of ${bytes} bytes: must be at most ${mostBytes} bytes`);
  }
}

/** What an answer always holds. */
function must<T>(value: T | undefined): T {
  if (value === undefined) throw new SidecarUnavailableError('the sidecar answered with nothing');
  return value;
}

function slotOf(field: string, slot: number | bigint): bigint {
  if (typeof slot === 'bigint') return slot;
  if (!Number.isSafeInteger(slot)) {
    throw new ClientError(`${field} ${show(slot)}: must be whole milliseconds since the epoch`);
  }
  return BigInt(slot);
}

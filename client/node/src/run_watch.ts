/** `RunWatch`: the stream of `AdminClient.watchRuns`, to be iterated over. Imports grpc-js and errors. */

import type * as grpc from '@grpc/grpc-js';
import { SidecarUnavailableError, type SidecarError } from './errors';
import type { WatchRunsResponse } from './generated/anarchon/v1/admin_pb';
import type { Run } from './generated/anarchon/v1/run_pb';

/** What a watch needs besides its call. */
export interface WatchSetup {
  /** How long the sidecar has to begin. */
  timeoutMs: number;
  /** Ends the watch. */
  signal: AbortSignal | undefined;
  /** Where the sidecar is, for messages. */
  address: string;
  /** What a failed call means. */
  errorOf: (status: grpc.ServiceError) => SidecarError;
}

/**
 * The runs that `AdminClient.watchRuns` watches, as they change: to be gone through once, with
 * `for await`. Leaving the loop, or `close`, ends the watch.
 *
 * Nothing is fetched ahead of the loop but what gRPC holds; a slow reader is sent fewer states of a run,
 * and always its latest.
 */
export class RunWatch implements AsyncIterableIterator<Run> {
  /** Nothing more comes of the call. */
  private isOver = false;
  /** Nor is anything given that has come. */
  private isClosed = false;
  /** What ended it; thrown once, after what came before. */
  private error: unknown;
  private waiting: (() => void)[] = [];
  private readonly abort: () => void;

  private constructor(
    private readonly call: grpc.ClientReadableStream<WatchRunsResponse>,
    private readonly setup: WatchSetup,
  ) {
    this.abort = () => this.close(setup.signal?.reason);
    setup.signal?.addEventListener('abort', this.abort);
    call.on('readable', () => this.wake());
    call.on('end', () => this.over());
    call.on('error', (status: grpc.ServiceError) => this.over(setup.errorOf(status)));
  }

  /** Resolved when the sidecar watches; rejected where it does not, or the signal is aborted. */
  static begin(
    call: grpc.ClientReadableStream<WatchRunsResponse>,
    setup: WatchSetup,
  ): Promise<RunWatch> {
    const { timeoutMs, signal, address, errorOf } = setup;
    return new Promise((resolve, reject) => {
      const watch = new RunWatch(call, setup);
      const late = setTimeout(() => {
        const what = `did not begin to watch within ${timeoutMs / 1_000} s`;
        reject(new SidecarUnavailableError(`the sidecar at ${address} ${what}`));
        watch.close();
      }, timeoutMs);
      call.once('metadata', () => {
        clearTimeout(late);
        resolve(watch);
      });
      call.once('error', (status: grpc.ServiceError) => {
        clearTimeout(late);
        reject(signal?.aborted ? (signal.reason as Error) : errorOf(status));
      });
    });
  }

  /** The next run. Rejected with what ended the watch: with the signal's reason where that did. */
  async next(): Promise<IteratorResult<Run, undefined>> {
    for (;;) {
      const change = this.isClosed ? null : (this.call.read() as WatchRunsResponse | null);
      if (change?.run) return { done: false, value: change.run };
      if (this.error !== undefined) {
        const { error } = this;
        this.error = undefined;
        throw error as Error;
      }
      if (this.isOver) return { done: true, value: undefined };
      await new Promise<void>((resolve) => this.waiting.push(resolve));
    }
  }

  /** What `for await` calls where its loop is left. */
  return(): Promise<IteratorResult<Run, undefined>> {
    this.close();
    return Promise.resolve({ done: true, value: undefined });
  }

  /** Watch no longer: iterating ends, by throwing `error` where one is given. */
  close(error?: unknown): void {
    this.isClosed = true;
    this.over(error);
    this.call.cancel();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  private over(error?: unknown): void {
    if (this.isOver) return;
    this.isOver = true;
    this.error = error;
    this.setup.signal?.removeEventListener('abort', this.abort);
    this.wake();
  }

  private wake(): void {
    for (const resolve of this.waiting.splice(0)) resolve();
  }
}

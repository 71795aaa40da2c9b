/**
 * Ends the process at a given time, whatever its handlers do. Imports node's own modules and the clock.
 *
 * Only the main thread can end a node process with a status, and a handler may have that thread for
 * itself. So there are two timers: one on the event loop, which exits with status 1, and a worker
 * thread, which kills the process where the loop did not come round to it.
 */

import { join } from 'node:path';
import { Worker } from 'node:worker_threads';
import type { Clock } from './clock';
import { stderrLogger } from './logger';

/** The loop comes first by so much. */
const LOOP_FIRST_MS = 100;

/** What worker and timer share: when to end, by the system's clock; 0: never. */
export type SharedTime = BigInt64Array<SharedArrayBuffer>;

/** Ends the process at the time that was last set. */
export class ExitTimer {
  private readonly sharedTime: SharedTime = new BigInt64Array(new SharedArrayBuffer(8));
  private readonly worker: Worker;
  private timer: NodeJS.Timeout | undefined;
  private atMs: number | undefined;

  constructor(private readonly clock: Clock) {
    this.worker = new Worker(join(__dirname, 'exit_worker.js'), {
      workerData: this.sharedTime,
    });
    this.worker.unref();
  }

  /** End the process at `atMs`; `undefined`: do not. */
  set(atMs: number | undefined): void {
    if (atMs === this.atMs) return;
    this.atMs = atMs;
    clearTimeout(this.timer);
    Atomics.store(this.sharedTime, 0, BigInt(atMs ?? 0));
    Atomics.notify(this.sharedTime, 0);
    if (atMs !== undefined) {
      const leftMs = Math.max(0, atMs - LOOP_FIRST_MS - this.clock.nowMs());
      this.timer = setTimeout(() => this.exit(), leftMs);
    }
  }

  /** Let the process live. */
  close(): void {
    this.set(undefined);
    void this.worker.terminate();
  }

  private exit(): void {
    stderrLogger.error('a handler did not stop when its lease was lost: the process ends');
    process.exit(1);
  }
}

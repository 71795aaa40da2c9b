/** The thread behind `ExitTimer`: it waits for the time that is shared with it, and ends the process. */

import { workerData } from 'node:worker_threads';
import { SystemClock } from './clock';
import type { SharedTime } from './exit_timer';

/** Waiting does not count the time for which the machine sleeps, so the clock is looked at this often. */
const LOOK_EVERY_MS = 1_000;

const sharedTime = workerData as SharedTime;
const clock = new SystemClock();

for (;;) {
  const at = Atomics.load(sharedTime, 0);
  const leftMs = at === 0n ? Infinity : Number(at) - clock.nowMs();
  if (leftMs <= 0) process.kill(process.pid, 'SIGKILL');
  Atomics.wait(sharedTime, 0, at, Math.min(leftMs, LOOK_EVERY_MS));
}

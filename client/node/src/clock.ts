/** The clock that decides about trust. Imports node's own modules only. */

import { uptime } from 'node:os';

/** Milliseconds that only go forward and go on while the machine sleeps. */
export interface Clock {
  /** The time now, rounded down to whole milliseconds, from an origin that means nothing. */
  nowMs(): number;
}

/**
 * The system's own. `process.hrtime` counts the time for which the machine sleeps on macOS and
 * Windows, but not on Linux. There `os.uptime` does (CLOCK_BOOTTIME, in steps of 10 ms): it is never
 * ahead of the true time, so the most that it was ahead of `hrtime` is what has been slept.
 */
export class SystemClock implements Clock {
  private sleptMs = process.platform === 'linux' ? -Infinity : 0;

  nowMs(): number {
    const awakeMs = Number(process.hrtime.bigint() / 1_000_000n);
    if (process.platform === 'linux') {
      this.sleptMs = Math.max(this.sleptMs, Math.floor(uptime() * 1_000) - awakeMs);
    }
    return awakeMs + this.sleptMs;
  }
}

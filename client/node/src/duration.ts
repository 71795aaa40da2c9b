/** Durations: the text "1h30m" and the wire's form. Imports protobuf's messages only. */

import { create } from '@bufbuild/protobuf';
import { DurationSchema, type Duration as WireDuration } from '@bufbuild/protobuf/wkt';

/**
 * A length of time as text: whole numbers with the units `w d h m s ms`, largest first, each once,
 * as in `"10s"`, `"1h30m"` or `"250ms"`.
 */
export type Duration = string;

/** Largest first: the order in which they are written. */
const UNITS_MS = [
  ['w', 604_800_000],
  ['d', 86_400_000],
  ['h', 3_600_000],
  ['m', 60_000],
  ['s', 1_000],
  ['ms', 1],
] as const;
/** 366 days in milliseconds have 11 digits, and so 12 a unit are more than enough. */
const TEXT = new RegExp(
  `^${UNITS_MS.map(([unit]) => `(?:([0-9]{1,12})${unit}(?![a-z]))?`).join('')}$`,
);
const LONGEST_TEXT = 64;
const LONGEST_MS = 36_600 * 86_400_000;
const GRAMMAR =
  'whole numbers with the units w d h m s ms, largest first, each once, as in "1h30m"';

/**
 * The whole milliseconds that a text means. Throws `RangeError`, saying what would be right, for
 * anything else.
 */
export function parseDuration(value: unknown): number {
  if (typeof value !== 'string') {
    throw new RangeError(`write a text such as "10s", not ${typeOf(value)}`);
  }
  const match = value.length > 0 && value.length <= LONGEST_TEXT ? TEXT.exec(value) : null;
  if (match === null) throw new RangeError(whatToWrite(value));
  const totalMs = UNITS_MS.reduce(
    (sum, [, unitMs], n) => sum + Number(match[n + 1] ?? 0) * unitMs,
    0,
  );
  if (totalMs > LONGEST_MS) {
    throw new RangeError('a duration cannot be longer than a hundred years');
  }
  return totalMs;
}

/** The shortest text that means so many milliseconds: "1h30m"; zero is "0s". */
export function formatDuration(durationMs: number): Duration {
  let restMs = Math.floor(durationMs);
  let text = '';
  for (const [unit, unitMs] of UNITS_MS) {
    const number = Math.floor(restMs / unitMs);
    restMs -= number * unitMs;
    if (number > 0) text += `${number}${unit}`;
  }
  return text || '0s';
}

/** The wire's form of whole milliseconds. */
export function toWire(durationMs: number): WireDuration {
  return create(DurationSchema, {
    seconds: BigInt(Math.floor(durationMs / 1_000)),
    nanos: (durationMs % 1_000) * 1_000_000,
  });
}

/** The whole milliseconds of a duration received, none where there is none. */
export function wireToMs(wire: WireDuration | undefined): number {
  return wire === undefined ? 0 : Number(wire.seconds) * 1_000 + Math.trunc(wire.nanos / 1_000_000);
}

function whatToWrite(text: string): string {
  if (text.length > LONGEST_TEXT) return `a duration has at most ${LONGEST_TEXT} characters`;
  if (text !== text.trim()) return 'no white space around a duration';
  if (/^[0-9]+$/.test(text)) {
    return `a number needs its unit: "${text}s" is seconds, "${text}m" minutes`;
  }
  if (/^[0-9]*[.,][0-9]+[a-z]+$/.test(text)) {
    return `no fractions (90m, not 1.5h): write ${GRAMMAR}`;
  }
  if (/^[0-9]+(mo|y)$/.test(text)) {
    return 'months and years have no fixed length: write days, or a cron expression';
  }
  return `write ${GRAMMAR}`;
}

function typeOf(value: unknown): string {
  return value === null ? 'null' : typeof value;
}

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { formatDuration, parseDuration, toWire, wireToMs } from '../src/duration';
import { vectors } from './vectors';

const { valid, invalid } = vectors('durations.json') as {
  valid: { text: string; duration_ms: number; canonical: string }[];
  invalid: { text: string }[];
};

test('a text means what the shared vectors say', () => {
  assert.ok(valid.length > 10);
  for (const { text, duration_ms, canonical } of valid) {
    assert.equal(parseDuration(text), duration_ms, text);
    assert.equal(formatDuration(duration_ms), canonical, text);
  }
});

test('what the shared vectors refuse is refused, and it is said what to write', () => {
  const says = /write|white space|needs its unit|at most|fixed length/;
  assert.ok(invalid.length > 10);
  for (const { text } of invalid) {
    assert.throws(() => parseDuration(text), { name: 'RangeError', message: says }, text);
  }
});

test('what is no duration is refused', () => {
  assert.throws(() => parseDuration('999999999999w'), /a hundred years/);
  assert.throws(() => parseDuration(10), /write a text such as "10s", not number/);
  assert.throws(() => parseDuration(null), /not null/);
});

test('the wire keeps every millisecond', () => {
  for (const durationMs of [0, 1, 999, 1_000, 61_001, 86_400_000 * 366]) {
    assert.equal(wireToMs(toWire(durationMs)), durationMs);
  }
  assert.equal(wireToMs(undefined), 0);
});

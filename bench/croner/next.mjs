// Asks croner for slots. Reads one JSON object a line and answers each with one, in the same order:
//
//   {"expression", "tz", "after_ms", "count", "upto_ms"?}  ->  {"slots": [...]} or {"refused": "why"}
//   {"tz", "at_ms": [...]}                                 ->  {"offsets_s": [...]} or {"refused": "why"}
//
// Slots are strictly later than after_ms, at most `count` and none later than upto_ms. Offsets are
// what this Node takes local time minus UTC to be.

import { createInterface } from "node:readline";
import { Cron } from "croner";

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(JSON.stringify(answer(JSON.parse(line))) + "\n");
}

function answer(question) {
  try {
    return question.at_ms ? { offsets_s: offsets(question) } : { slots: slots(question) };
  } catch (error) {
    return { refused: error.message };
  }
}

function slots({ expression, tz, after_ms, count, upto_ms = Infinity }) {
  const cron = new Cron(expression, {
    timezone: tz,
    mode: "5-or-6-parts",
    fixedTimeRule: "no-wildcard",
    sloppyRanges: true, // 5/15 is 5-59/15
    domAndDow: bothDays(expression),
  });
  const found = [];
  let at = new Date(after_ms);
  while (found.length < count) {
    at = cron.nextRun(at);
    if (at === null || at.getTime() > upto_ms) break;
    found.push(at.getTime());
  }
  return found;
}

// Anarchon's rule for the two day fields, which is Debian's: both, if one begins with a star.
function bothDays(expression) {
  const fields = expression.trim().split(/\s+/);
  return [fields.at(-3), fields.at(-1)].some((field) => /^[*?]/.test(field));
}

function offsets({ tz, at_ms }) {
  const clock = new Intl.DateTimeFormat("en-US", {
    timeZone: tz,
    hourCycle: "h23",
    year: "numeric",
    month: "numeric",
    day: "numeric",
    hour: "numeric",
    minute: "numeric",
    second: "numeric",
  });
  return at_ms.map((at) => {
    const part = Object.fromEntries(clock.formatToParts(at).map(({ type, value }) => [type, +value]));
    const { year, month, day, hour, minute, second } = part;
    return (Date.UTC(year, month - 1, day, hour, minute, second) - at) / 1000;
  });
}

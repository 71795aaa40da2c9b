/** The cases that every client must pass: tests/conformance/vectors. */

import { readFileSync } from 'node:fs';
import { join } from 'node:path';

/** Tests run from client/node/.build/tests. */
export const ROOT = join(__dirname, '../../../..');

export function vectors(name: string): unknown {
  return JSON.parse(readFileSync(join(ROOT, 'tests/conformance/vectors', name), 'utf8'));
}

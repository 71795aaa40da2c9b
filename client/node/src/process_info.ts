/** Who we are, for the sidecar. Imports node's own modules and the wire's messages. */

import { create } from '@bufbuild/protobuf';
import { readFileSync, statSync } from 'node:fs';
import { hostname } from 'node:os';
import { ClientInfoSchema, type ClientInfo } from './generated/anarchon/v1/session_pb';

/** The version of this package, as package.json says it. */
export const VERSION = '0.1.0';

/** What Subscribe says of the client. `watched`: whether its process's end is to be watched for. */
export function clientInfo(watched: boolean): ClientInfo {
  const [processStartTicks, pidNamespace] = watched ? processIdentity() : [0n, 0n];
  return create(ClientInfoSchema, {
    language: 'node',
    version: VERSION,
    host: hostname(),
    processId: process.pid,
    processStartTicks,
    pidNamespace,
  });
}

/** What tells this process from a later one with its number; zeros where there is no /proc. */
function processIdentity(): [bigint, bigint] {
  try {
    const stat = readFileSync('/proc/self/stat', 'utf8');
    // The command's name, in brackets, may hold anything; the fields are counted after it.
    const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
    const startTicks = BigInt(fields[22 - 3] ?? '');
    return [startTicks, statSync('/proc/self/ns/pid', { bigint: true }).ino];
  } catch {
    return [0n, 0n];
  }
}

/** A logger for tests: keeps what it was told. */

import type { Logger } from '../src/logger';

export class MemoryLogger implements Logger {
  readonly lines: string[] = [];

  get text(): string {
    return this.lines.join('\n');
  }

  info(message: string): void {
    this.lines.push(`info: ${message}`);
  }

  warn(message: string): void {
    this.lines.push(`warn: ${message}`);
  }

  error(message: string): void {
    this.lines.push(`error: ${message}`);
  }
}

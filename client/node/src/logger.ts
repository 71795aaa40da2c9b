/** Where the client logs. Imports nothing of ours. */

import { inspect } from 'node:util';

/**
 * What the client logs with: `console` is one, and so are the loggers of pino, winston and the like.
 * Each call is one message; a failure's has the stack trace in it.
 */
export interface Logger {
  /** What people may want to know. */
  info(message: string): void;
  /** What people should look at. */
  warn(message: string): void;
  /** What went wrong. */
  error(message: string): void;
}

/** The default: everything to standard error, so that standard output stays the application's. */
export const stderrLogger: Logger = {
  info: (message) => console.error(`anarchon: ${message}`),
  warn: (message) => console.error(`anarchon: warning: ${message}`),
  error: (message) => console.error(`anarchon: error: ${message}`),
};

/** A logger that puts `prefix` before each message. */
export function prefixed(logger: Logger, prefix: string): Logger {
  return {
    info: (message) => logger.info(`${prefix}: ${message}`),
    warn: (message) => logger.warn(`${prefix}: ${message}`),
    error: (message) => logger.error(`${prefix}: ${message}`),
  };
}

/**
 * `logger`, as the client uses it: where it throws, or is async and rejects, the client goes on, and
 * what was to be said goes to standard error, after what the logger made of it.
 */
export function guarded(logger: Logger): Logger {
  const at =
    (level: keyof Logger) =>
    (message: string): void => {
      const instead = (error: unknown): void => {
        const why = error instanceof Error ? `${error.name}: ${error.message}` : inspect(error);
        stderrLogger.warn(`the logger has failed: ${why}`);
        stderrLogger[level](message);
      };
      try {
        // By its type it gives nothing, but an async function fits that, too.
        const given = (logger as Record<keyof Logger, (text: string) => unknown>)[level](message);
        if (given instanceof Promise) given.catch(instead);
      } catch (error) {
        instead(error);
      }
    };
  return { info: at('info'), warn: at('warn'), error: at('error') };
}

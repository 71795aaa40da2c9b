/** Where the client logs. Imports nothing. */

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

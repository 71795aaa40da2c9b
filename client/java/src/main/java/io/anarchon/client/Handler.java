package io.anarchon.client;

/**
 * Runs one attempt of a job, in a thread of its own.
 *
 * <p>What it returns is kept with the run: nothing for null, a text as it is, and any other value
 * as JSON. An exception fails the attempt; {@link Retry} and {@link Permanent} say more of it. When
 * the attempt is to stop its thread is interrupted: a handler that then throws {@link
 * InterruptedException} or {@link CancelledException} has stopped as it was told.
 */
@FunctionalInterface
public interface Handler {
  /** Runs the attempt. */
  Object run(RunContext context) throws Exception;

  /** A handler that gives nothing. */
  @FunctionalInterface
  interface OfNothing {
    /** Runs the attempt. */
    void run(RunContext context) throws Exception;
  }
}

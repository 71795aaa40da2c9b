/**
 * Runs the scheduled jobs of a Java service that has many instances: each scheduled time on exactly
 * one of them.
 *
 * <p>A sidecar beside every instance decides who runs what; this package is the application's side
 * of it. Start with {@link io.anarchon.client.AnarchonClient}. The words and all rules are those of
 * the client specification, {@code client/README.md} of the project.
 *
 * <p>{@code Session} decides everything, and does no I/O: it takes facts and a time, and returns
 * commands. {@code Subscription} carries them out, with {@code Runner} for handlers and {@code
 * Transport} for calls.
 */
package io.anarchon.client;

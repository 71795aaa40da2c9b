package io.anarchon.client;

import io.anarchon.v1.CloseSessionRequest;
import io.anarchon.v1.CloseSessionResponse;
import io.anarchon.v1.CompleteRequest;
import io.anarchon.v1.CompleteResponse;
import io.anarchon.v1.KeepAliveRequest;
import io.anarchon.v1.KeepAliveResponse;
import io.anarchon.v1.SubscribeRequest;
import io.anarchon.v1.SubscribeResponse;

/**
 * The calls of the protocol's SessionService. No method waits; callbacks come in any thread. Safe
 * to use in any thread. Timeouts are milliseconds.
 */
interface Transport {
  /** What becomes of a call. */
  interface Answer<T> {
    void answered(T response);

    void failed(AnarchonException.Sidecar error);
  }

  /** What comes on a stream; {@link #ended} is the last. */
  interface Events {
    void event(SubscribeResponse event);

    void ended(AnarchonException.Sidecar error);
  }

  /**
   * Opens the session's stream, waiting for a sidecar as long as it takes; returns what ends it.
   */
  Runnable subscribe(SubscribeRequest request, Events events);

  /** Renews the session, without waiting for a sidecar that is not there. */
  void keepAlive(KeepAliveRequest request, long timeout, Answer<KeepAliveResponse> answer);

  /** Reports results, waiting for a sidecar until the timeout. */
  void complete(CompleteRequest request, long timeout, Answer<CompleteResponse> answer);

  /** Ends the session. */
  void closeSession(CloseSessionRequest request, long timeout, Answer<CloseSessionResponse> answer);

  /** Lets go of everything. */
  void close();
}

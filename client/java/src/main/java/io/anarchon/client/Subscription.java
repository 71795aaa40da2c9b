package io.anarchon.client;

import io.anarchon.v1.CloseSessionResponse;
import io.anarchon.v1.CompleteResponse;
import io.anarchon.v1.KeepAliveResponse;
import io.anarchon.v1.SubscribeRequest;
import io.anarchon.v1.SubscribeResponse;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.DoubleSupplier;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Jobs that are being run. Made by {@link AnarchonClient#subscribe}; safe to use in any thread.
 * Closing it stops it with the client's grace, and waits.
 */
public final class Subscription implements AutoCloseable {
  private static final Logger LOG = LoggerFactory.getLogger("anarchon");

  /** Java's waits stop while the machine sleeps, so the clock that counts sleep is looked at. */
  private static final long WATCH_EVERY_MS = 1_000;

  private static final String OWN_ERROR =
      "the client has failed, which is an error of Anarchon's own";

  private final Duration stopGrace;
  private final Session session; // used by the session's thread alone
  private final String sessionId;
  private final Transport transport;
  private final Runner runner;
  private final Clock clock;
  private final Orders.Trust trust = new Orders.Trust(0);
  private final ExitTimer exitTimer;
  private final LinkedBlockingQueue<Session.Fact> facts = new LinkedBlockingQueue<>();
  private final ExecutorService threads;
  private Runnable endStream = () -> {};
  private final CompletableFuture<String> ready = new CompletableFuture<>();
  private final CompletableFuture<Void> closed = new CompletableFuture<>();
  private final AtomicLong tickets = new AtomicLong();
  private final Map<Long, CompletableFuture<Void>> confirms = new ConcurrentHashMap<>();
  private volatile boolean isOver;
  private volatile boolean isAskedFor;
  private volatile boolean isReadyAskedFor;
  private boolean wasReady; // used by the session's thread alone

  Subscription(
      SubscribeRequest request,
      Map<String, Job> jobs,
      Transport transport,
      Clock clock,
      DoubleSupplier random,
      Duration stopGrace,
      boolean exits) {
    this.stopGrace = stopGrace;
    this.transport = transport;
    this.clock = clock;
    exitTimer = exits ? ExitTimer.started(clock) : ExitTimer.none(clock);
    sessionId = request.getSessionId();
    session = new Session(request, random);
    AtomicInteger number = new AtomicInteger();
    // Daemons, because a handler that never ends must not keep the process from ending.
    threads =
        Executors.newCachedThreadPool(
            task -> {
              Thread thread = new Thread(task, "anarchon-" + number.incrementAndGet());
              thread.setDaemon(true);
              return thread;
            });
    runner =
        new Runner(
            jobs,
            clock,
            trust,
            threads,
            (token, outcome) -> facts.add(new Session.HandlerEnded(token, outcome)),
            this::letLive,
            this::confirm);
    facts.add(new Session.Start());
    threads.execute(this::loop);
  }

  /** Returns what names the session in the sidecar's list of clients. */
  public String sessionId() {
    return sessionId;
  }

  /**
   * Done when the sidecar has accepted the jobs and answers: gives its instance's name. Where the
   * subscription ends before, it completes exceptionally: with what {@link #closed} does, or
   * because it was stopped.
   */
  public CompletableFuture<String> ready() {
    isReadyAskedFor = true;
    return ready.copy();
  }

  /**
   * Done when the subscription is over: after {@link #stop}, or exceptionally with the error that
   * ended it: an {@link AnarchonException.Refused} where the sidecar does not accept a job or the
   * client, or an {@link AnarchonException.SessionReplaced}. The error is logged where nobody has
   * asked for it, here, by {@link #stop} or by {@link #await}.
   */
  public CompletableFuture<Void> closed() {
    isAskedFor = true;
    return closed.copy();
  }

  /** As {@link #stop(Duration)}, with the client's grace. */
  public CompletableFuture<Void> stop() {
    return stop(stopGrace);
  }

  /**
   * Stops: no more runs are taken; handlers may go on for the grace, and for their job's own where
   * that is shorter, then they are cancelled. Runs that were cancelled are handed over to other
   * instances at once. Called again, it can only shorten the grace. Gives what {@link #closed}
   * gives.
   */
  public CompletableFuture<Void> stop(Duration grace) {
    Durations.check("grace", grace);
    isAskedFor = true;
    return stop(grace, "");
  }

  CompletableFuture<Void> stop(Duration grace, String hint) {
    facts.add(new Session.StopAsked(grace.toMillis(), hint));
    return closed.copy();
  }

  /** As {@link #stop(Duration)}, with a text such as "10s". */
  public CompletableFuture<Void> stop(String grace) {
    return stop(Durations.parse("grace", grace));
  }

  /**
   * Stops with the client's grace, and waits. An interrupt meanwhile ends the grace, and stays set.
   * Throws what {@link #closed} gives.
   */
  @Override
  public void close() {
    stop();
    boolean isInterrupted = false;
    try {
      while (true) {
        try {
          await();
          return;
        } catch (InterruptedException error) {
          isInterrupted = true;
          stop(Duration.ZERO);
        }
      }
    } finally {
      if (isInterrupted) {
        Thread.currentThread().interrupt();
      }
    }
  }

  /** Waits until the subscription is over. Throws what {@link #closed} gives. */
  public void await() throws InterruptedException {
    isAskedFor = true;
    try {
      closed.get();
    } catch (ExecutionException error) {
      if (error.getCause() instanceof AnarchonException ours) {
        throw ours;
      }
      throw new AnarchonException(OWN_ERROR, error.getCause());
    }
  }

  /**
   * Has the subscription stopped, with the client's grace, when the JVM shuts down: by SIGINT,
   * SIGTERM or {@code System.exit}. The JVM waits for it; a signal meanwhile ends the grace, where
   * the JVM lets it be heard.
   */
  public void stopAtShutdown() {
    Thread hook = new Thread(this::stopInShutdown, "anarchon-stop");
    Runtime.getRuntime().addShutdownHook(hook);
    closed.whenComplete(
        (done, error) -> {
          try {
            Runtime.getRuntime().removeShutdownHook(hook);
          } catch (IllegalStateException shuttingDown) {
            // It has run, or runs.
          }
        });
  }

  private void stopInShutdown() {
    boolean isHeard = Signals.handle(() -> stop(Duration.ZERO, ""));
    stop(stopGrace, isHeard ? "a signal now cancels them" : "");
    closed.handle((done, error) -> done).join(); // the error is told by those who asked
  }

  boolean isOver() {
    return closed.isDone();
  }

  // ── The loop: facts to the session, its commands carried out ────────────────────────────────

  private void loop() {
    AnarchonException error = null;
    Throwable failed = null;
    try {
      Session.Closed over = null;
      while (over == null) {
        long wait = Math.min(session.wakeAt() - clock.now(), WATCH_EVERY_MS);
        Session.Fact fact = facts.poll(Math.max(0, wait), TimeUnit.MILLISECONDS);
        for (Session.Command command :
            session.handle(clock.now(), fact == null ? new Session.Tick() : fact)) {
          if (command instanceof Session.Closed it) {
            over = it;
          } else {
            carryOut(command);
          }
        }
        exitTimer.set(session.exitAt());
      }
      error = over.error();
    } catch (RuntimeException | Error | InterruptedException ours) {
      LOG.error(OWN_ERROR, ours);
      failed = ours;
    } finally {
      end(error, failed);
    }
  }

  private void end(AnarchonException error, Throwable failed) {
    // Nobody renews from here on: what still runs is told so.
    runner.abandon();
    letLive();
    endStream.run();
    transport.close();
    isOver = true;
    confirms
        .values()
        .forEach(
            each ->
                each.completeExceptionally(
                    new AnarchonException.NotConfirmed("the client has stopped")));
    Throwable why = failed != null ? failed : error;
    boolean isTold = isAskedFor || (isReadyAskedFor && !wasReady);
    if (error != null && !isTold) {
      LOG.error("the client stops: {}", error.getMessage());
    }
    Throwable neverReady = why != null ? why : new AnarchonException("stopped before it was ready");
    try {
      // Elsewhere, because what the application does then may wait for the end.
      threads.execute(() -> ready.completeExceptionally(neverReady));
    } finally {
      threads.shutdown();
      if (why == null) {
        closed.complete(null);
      } else {
        closed.completeExceptionally(why);
      }
    }
  }

  /** After the end: no exit any more, once no handler runs. */
  private void letLive() {
    if (!runner.isRunning()) {
      exitTimer.end();
    }
  }

  private void carryOut(Session.Command command) {
    if (command instanceof Session.OpenStream it) {
      endStream.run();
      endStream = transport.subscribe(it.request(), eventsOf(it.stream()));
    } else if (command instanceof Session.EndStream) {
      endStream.run();
    } else if (command instanceof Session.SendKeepAlive it) {
      transport.keepAlive(it.request(), it.timeout(), keptAlive(it.number()));
    } else if (command instanceof Session.SendResults it) {
      transport.complete(it.request(), it.timeout(), reported(it));
    } else if (command instanceof Session.SendClose it) {
      transport.closeSession(it.request(), it.timeout(), sessionClosed());
    } else if (command instanceof Session.StartHandler it) {
      runner.start(it.assignment());
    } else if (command instanceof Session.CancelHandler it) {
      runner.cancel(it.token(), it.reason(), it.message(), it.trusted());
    } else if (command instanceof Session.SetTrust it) {
      trust.set(it.end());
    } else if (command instanceof Session.AnswerConfirm it) {
      answer(it);
    } else if (command instanceof Session.Ready it) {
      // Elsewhere, because what the application does then must not hold up the keep-alives.
      wasReady = true;
      threads.execute(() -> ready.complete(it.instanceId()));
    } else if (command instanceof Session.Say it) {
      switch (it.level()) {
        case INFO -> LOG.info(it.message());
        case WARNING -> LOG.warn(it.message());
        case ERROR -> LOG.error(it.message());
      }
    } else {
      throw new AssertionError(command);
    }
  }

  private Transport.Events eventsOf(int stream) {
    return new Transport.Events() {
      @Override
      public void event(SubscribeResponse event) {
        facts.add(new Session.StreamEvent(stream, event));
      }

      @Override
      public void ended(AnarchonException.Sidecar error) {
        facts.add(new Session.StreamEnded(stream, error));
      }
    };
  }

  private Transport.Answer<KeepAliveResponse> keptAlive(int number) {
    return new Transport.Answer<>() {
      @Override
      public void answered(KeepAliveResponse response) {
        facts.add(new Session.KeepAliveAnswered(number, response));
      }

      @Override
      public void failed(AnarchonException.Sidecar error) {
        facts.add(new Session.KeepAliveFailed(number, error));
      }
    };
  }

  private Transport.Answer<CompleteResponse> reported(Session.SendResults sent) {
    return new Transport.Answer<>() {
      @Override
      public void answered(CompleteResponse response) {
        facts.add(new Session.ResultsAnswered(sent.tokens(), response));
      }

      @Override
      public void failed(AnarchonException.Sidecar error) {
        facts.add(new Session.ResultsFailed(sent.tokens(), error));
      }
    };
  }

  private Transport.Answer<CloseSessionResponse> sessionClosed() {
    return new Transport.Answer<>() {
      @Override
      public void answered(CloseSessionResponse response) {
        facts.add(new Session.CloseEnded());
      }

      @Override
      public void failed(AnarchonException.Sidecar error) {
        LOG.warn("the session could not be closed, and ends by time-out: {}", error.getMessage());
        facts.add(new Session.CloseEnded());
      }
    };
  }

  /** Asks for a fresh renewal, in a handler's thread. */
  private void confirm(String token) throws InterruptedException {
    long ticket = tickets.incrementAndGet();
    CompletableFuture<Void> answer = new CompletableFuture<>();
    confirms.put(ticket, answer);
    try {
      if (isOver) {
        throw new AnarchonException.NotConfirmed("the client has stopped");
      }
      facts.add(new Session.ConfirmAsked(token, ticket));
      answer.get();
    } catch (ExecutionException error) {
      throw (AnarchonException) error.getCause();
    } finally {
      confirms.remove(ticket);
    }
  }

  private void answer(Session.AnswerConfirm it) {
    CompletableFuture<Void> waiting = confirms.get(it.ticket());
    if (waiting == null) {
      return; // the handler has ended meanwhile
    }
    if (it.error() == null) {
      waiting.complete(null);
    } else {
      waiting.completeExceptionally(it.error());
    }
  }
}

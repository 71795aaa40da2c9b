package io.anarchon.client;

import io.anarchon.v1.Assignment;
import io.anarchon.v1.Attached;
import io.anarchon.v1.CancelReason;
import io.anarchon.v1.Cancellation;
import io.anarchon.v1.CloseSessionRequest;
import io.anarchon.v1.CompleteRequest;
import io.anarchon.v1.CompleteResponse;
import io.anarchon.v1.JobSpec;
import io.anarchon.v1.KeepAliveRequest;
import io.anarchon.v1.KeepAliveResponse;
import io.anarchon.v1.Outcome;
import io.anarchon.v1.Receipt;
import io.anarchon.v1.ReceiptStatus;
import io.anarchon.v1.Result;
import io.anarchon.v1.Stopped;
import io.anarchon.v1.SubscribeRequest;
import io.anarchon.v1.SubscribeResponse;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.function.DoubleSupplier;

/**
 * The session as a state machine without I/O: the client specification in code.
 *
 * <p>{@link #handle} takes what has happened and returns what is to be done; {@link #wakeAt} says
 * when to call it again with a {@link Tick}. Time and chance come in from outside.
 *
 * <p>A session is detached (no stream), subscribing (one is being opened), attached, or closed.
 * Leaving is a direction, not a state: a session that leaves keeps its stream and its trust for as
 * long as a handler runs.
 */
final class Session {
  static final long NEVER = Long.MAX_VALUE;
  static final long BACKOFF_FIRST = 100;
  static final long BACKOFF_MAX = 5_000;

  /** Whatever a sidecar says, no more keep-alives than this. */
  static final long KEEP_ALIVE_INTERVAL_MIN = 200;

  static final long KEEP_ALIVE_TIMEOUT_MAX = 5_000;
  static final long COMPLETE_TIMEOUT = 10_000;

  /** At least; for the lease where it is longer, but not for longer than a lease can be. */
  static final long COMPLETE_FOR = 5 * 60_000;

  static final long COMPLETE_FOR_MAX = 60 * 60_000;
  static final long CLOSE_TIMEOUT = 5_000;
  static final long CANCEL_GRACE = 5_000;
  static final int REMEMBERED_BEYOND_CONCURRENCY = 1_024;
  static final int RESULTS_MAX = 1_000;
  static final int RESULTS_MAX_BYTES = 2 << 20;
  static final int MESSAGE_MAX_BYTES = 4 << 20;
  private static final int NAMES_SHOWN = 5;
  private static final int LEASE_LOST = CancelReason.CANCEL_REASON_LEASE_LOST_VALUE;
  private static final String NOT_KNOWN = "the sidecar no longer knows our session";

  // ── Facts: what has happened ────────────────────────────────────────────────────────────────

  sealed interface Fact {}

  /** The client wants the session. */
  record Start() implements Fact {}

  /** The time of wakeAt has come. */
  record Tick() implements Fact {}

  /** An event came on a stream. */
  record StreamEvent(int stream, SubscribeResponse event) implements Fact {}

  /** A stream ended, or could not be opened. */
  record StreamEnded(int stream, AnarchonException.Sidecar error) implements Fact {}

  /** A keep-alive was answered. */
  record KeepAliveAnswered(int number, KeepAliveResponse response) implements Fact {}

  /** A keep-alive was not answered, or with an error. */
  record KeepAliveFailed(int number, AnarchonException.Sidecar error) implements Fact {}

  /** A handler has returned, thrown or obeyed. */
  record HandlerEnded(String token, Outcome outcome) implements Fact {}

  /** Results got their receipts, one each, in the order in which they were sent. */
  record ResultsAnswered(List<String> tokens, CompleteResponse response) implements Fact {}

  /** Results got no answer, or an error. */
  record ResultsFailed(List<String> tokens, AnarchonException.Sidecar error) implements Fact {}

  /** A handler wants its lease renewed now. The ticket comes back with the answer. */
  record ConfirmAsked(String token, long ticket) implements Fact {}

  /**
   * The client wants to leave: handlers may go on for the grace. The hint says to people, where
   * there is something to wait for, how not to.
   */
  record StopAsked(long grace, String hint) implements Fact {}

  /** CloseSession was answered, or was not. */
  record CloseEnded() implements Fact {}

  // ── Commands: what is to be done, in this order ─────────────────────────────────────────────

  sealed interface Command {}

  /** Call Subscribe, and end the stream before. */
  record OpenStream(int stream, SubscribeRequest request) implements Command {}

  /** End the present stream. */
  record EndStream() implements Command {}

  /** Call KeepAlive; it counts as sent now. */
  record SendKeepAlive(int number, KeepAliveRequest request, long timeout) implements Command {}

  /** Call Complete. */
  record SendResults(List<String> tokens, CompleteRequest request, long timeout)
      implements Command {}

  /** Call CloseSession. */
  record SendClose(CloseSessionRequest request, long timeout) implements Command {}

  /** Run this attempt's handler. */
  record StartHandler(Assignment assignment) implements Command {}

  /** Tell a handler to stop. Trusted: it may still finish what it is at. */
  record CancelHandler(String token, int reason, String message, boolean trusted)
      implements Command {}

  /** Trust the session until then. */
  record SetTrust(long end) implements Command {}

  /** Answer a handler's question. No error: the lease was just renewed. */
  record AnswerConfirm(long ticket, AnarchonException error) implements Command {}

  /** The session is attached, and its first keep-alive answered. */
  record Ready(String instanceId) implements Command {}

  /** Tell people. */
  record Say(Level level, String message) implements Command {}

  /** The session is over. */
  record Closed(AnarchonException error) implements Command {}

  enum Level {
    INFO,
    WARNING,
    ERROR
  }

  // ── The machine ─────────────────────────────────────────────────────────────────────────────

  enum State {
    DETACHED,
    SUBSCRIBING,
    ATTACHED,
    CLOSED
  }

  /** An attempt whose handler runs. */
  private static final class Running {
    final Assignment assignment;
    boolean cancelled;
    long lostAt = NEVER;
    int lostBecause;

    Running(Assignment assignment) {
      this.assignment = assignment;
    }
  }

  /** An attempt whose handler has ended, and whose result has no receipt yet. */
  private static final class Finished {
    final Outcome outcome;
    final String label;
    final long repeatFor;
    final long giveUpAt;
    long sendAt;
    int tries;

    /** Its batch was refused: it goes alone, so that it spoils no other's. */
    boolean alone;

    Finished(long now, Assignment assignment, Outcome outcome) {
      this.outcome = outcome;
      label = labelOf(assignment);
      repeatFor = repeatFor(assignment);
      giveUpAt = now + repeatFor;
      sendAt = now;
    }
  }

  private record Ticketed(long ticket, String token) {}

  /** A keep-alive that has not been answered yet. Attached stream 0: none. */
  private record Unanswered(long sentAt, int attachedStream, List<Ticketed> tickets) {}

  private final SubscribeRequest request;
  private final DoubleSupplier random;
  private final Map<String, JobSpec> specs = new HashMap<>();
  private List<Command> commands = new ArrayList<>();

  private State state = State.DETACHED;
  private int stream;
  private long openAt = NEVER;
  private int failures;
  private boolean toldLost;
  private boolean wasAttached;
  private boolean isReady;
  private String instanceId = "";

  private long trustEnd;
  private long interval = KEEP_ALIVE_INTERVAL_MIN;
  private long keepAliveAt = NEVER;
  private int keepAlives;
  private int answered;
  private final Map<Integer, Unanswered> unanswered = new LinkedHashMap<>();
  private List<Ticketed> confirms = new ArrayList<>();

  private final Map<String, Assignment> held = new LinkedHashMap<>();
  private final Map<String, Running> running = new LinkedHashMap<>();
  private final Map<String, Finished> finished = new LinkedHashMap<>();
  private boolean isSending;
  private final ArrayDeque<String> remembered = new ArrayDeque<>();
  private final Set<String> known = new HashSet<>();

  private AnarchonException error;
  private boolean isLeaving;
  private long stopAt;
  private long graceEnd;
  private long leaveBy;
  private boolean isClosing;

  /** The request is without what is in flight; random draws from [0, 1). */
  Session(SubscribeRequest request, DoubleSupplier random) {
    this.request = request;
    this.random = random;
    request.getJobsList().forEach(spec -> specs.put(spec.getName(), spec));
  }

  /** Takes in what has happened, and returns what is to be done. */
  List<Command> handle(long now, Fact fact) {
    if (state == State.CLOSED) {
      return List.of();
    }
    noticeStandstill(now);
    // Before anything else: trust that has ended is not revived by what comes late (S4).
    endTrustIfOver(now);
    takeIn(now, fact);
    advance(now);
    List<Command> done = commands;
    commands = new ArrayList<>();
    return done;
  }

  /** Returns when to call handle with a Tick if nothing happens before. */
  long wakeAt() {
    if (state == State.CLOSED) {
      return NEVER;
    }
    long at = Math.min(openAt, keepAliveAt);
    for (Running run : running.values()) {
      if (run.lostAt == NEVER) {
        at = Math.min(at, trustEnd);
      }
      if (isLeaving && !isClosing && !run.cancelled) {
        at = Math.min(at, cancelAt(run));
      }
    }
    for (Finished done : finished.values()) {
      at = Math.min(at, done.giveUpAt);
      if (!isSending) {
        at = Math.min(at, done.sendAt);
      }
    }
    return isLeaving && !isClosing ? Math.min(at, leaveBy) : at;
  }

  /** Returns the tokens of every attempt that runs, or has ended without a receipt yet. */
  List<String> inFlight() {
    List<String> tokens = new ArrayList<>(running.keySet());
    tokens.addAll(finished.keySet());
    return tokens;
  }

  /**
   * Returns when a process that is not to outlive a lost lease must be gone: one keep-alive
   * interval, which is the margin of the session's shortest lease, after the trust of an attempt
   * that still runs. Never, while nothing runs.
   */
  long exitAt() {
    long at = NEVER;
    for (Running run : running.values()) {
      at = Math.min(at, (run.lostAt == NEVER ? trustEnd : run.lostAt) + interval);
    }
    return at;
  }

  long trustEnd() {
    return trustEnd;
  }

  State state() {
    return state;
  }

  int stream() {
    return stream;
  }

  int keepAlives() {
    return keepAlives;
  }

  long openAt() {
    return openAt;
  }

  // ── Facts ───────────────────────────────────────────────────────────────────────────────────

  private void takeIn(long now, Fact fact) {
    if (fact instanceof Start) {
      openAt = now;
    } else if (fact instanceof StreamEvent it) {
      if (it.stream == stream) {
        takeEvent(now, it.event);
      }
    } else if (fact instanceof StreamEnded it) {
      if (it.stream == stream) {
        streamEnded(now, it.error);
      }
    } else if (fact instanceof KeepAliveAnswered it) {
      keepAliveAnswered(now, it.number, it.response);
    } else if (fact instanceof KeepAliveFailed it) {
      keepAliveFailed(now, it.number, it.error);
    } else if (fact instanceof HandlerEnded it) {
      report(now, running.remove(it.token).assignment, it.outcome);
    } else if (fact instanceof ResultsAnswered it) {
      receipts(now, it.tokens, it.response);
    } else if (fact instanceof ResultsFailed it) {
      resultsFailed(now, it.tokens, it.error);
    } else if (fact instanceof ConfirmAsked it) {
      confirms.add(new Ticketed(it.ticket, it.token));
    } else if (fact instanceof StopAsked it) {
      boolean isNews = !isLeaving;
      leave(now, it.grace);
      if (isNews) {
        sayWhatIsWaitedFor(now, it.hint);
      }
    } else if (fact instanceof CloseEnded) {
      close();
    } // a Tick says nothing by itself
  }

  private void takeEvent(long now, SubscribeResponse event) {
    switch (event.getEventCase()) {
      case ATTACHED -> attached(now, event.getAttached());
      case RUNS -> {
        if (state == State.ATTACHED) {
          event.getRuns().getAssignmentsList().forEach(this::assigned);
        }
      }
      case CANCEL -> {
        Cancellation cancel = event.getCancel();
        boolean trusted = !io.anarchon.client.CancelReason.endsTrust(cancel.getReasonValue());
        cancel(now, cancel.getToken(), cancel.getReasonValue(), cancel.getMessage(), trusted);
      }
      case DRAIN -> say(Level.INFO, "the sidecar is going away: no more runs until it is back");
      default -> {} // a later version's
    }
  }

  private void attached(long now, Attached event) {
    state = State.ATTACHED;
    instanceId = event.getInstanceId();
    if (toldLost) {
      say(Level.INFO, "attached again, to instance " + instanceId);
      toldLost = false;
    } else if (!wasAttached) {
      say(Level.INFO, "attached to instance " + instanceId);
    }
    wasAttached = true;
    setInterval(Durations.toMillis(event.getKeepAliveInterval()));
    takeLost(now, event.getLostList());
    event.getNotesList().forEach(note -> say(Level.INFO, note));
    // It extends no trust, but shortens it: a sidecar that has come back may have shorter leases.
    shortenTrust(now + Durations.toMillis(event.getSessionTtl()));
    endTrustIfOver(now);
    // Nothing is handed out before this.
    keepAliveAt = now;
  }

  private void assigned(Assignment assignment) {
    String token = assignment.getToken();
    if (running.containsKey(token) || finished.containsKey(token) || known.contains(token)) {
      return; // delivered again
    }
    if (!specs.containsKey(assignment.getJob())) {
      say(
          Level.ERROR,
          "the sidecar sent a run of \"" + assignment.getJob() + "\", which we do not have");
      return;
    }
    // Started by advance, once there is trust and room.
    held.put(token, assignment);
  }

  private void streamEnded(long now, AnarchonException.Sidecar why) {
    state = State.DETACHED;
    held.clear();
    if (isFatal(why)) {
      fail(now, why);
    } else {
      boolean isUnknown = why instanceof AnarchonException.SessionNotFound;
      reopen(now, isUnknown ? NOT_KNOWN : why.getMessage());
    }
  }

  /** Subscribes again after a pause. */
  private void reopen(long now, String why) {
    if (state == State.SUBSCRIBING || state == State.ATTACHED) {
      commands.add(new EndStream());
    }
    state = State.DETACHED;
    held.clear();
    stream++; // no event of the old stream counts from here on
    if (error != null || isClosing) {
      return;
    }
    openAt = now + backoff(failures++, random.getAsDouble());
    if (!toldLost && !isLeaving) {
      toldLost = true;
      say(Level.WARNING, why + "; subscribing again until that succeeds");
    }
  }

  private void keepAliveAnswered(long now, int number, KeepAliveResponse response) {
    Unanswered sent = unanswered.remove(number);
    boolean isOfThisStream = sent.attachedStream == stream && state == State.ATTACHED;
    if (number > answered) {
      answered = number;
      // Counted from the sending: what the sidecar promised, it promised after that.
      long end = sent.sentAt + Durations.toMillis(response.getSessionTtl());
      if (isOfThisStream && response.getStreamOpen()) {
        setTrust(end);
      } else {
        // Nobody we are attached to: one that was restarted may not even know yet what is in
        // flight, or whether the store still has it as ours.
        shortenTrust(end);
      }
      if (response.hasKeepAliveInterval()) {
        setInterval(Durations.toMillis(response.getKeepAliveInterval()));
        if (keepAliveAt != NEVER) {
          keepAliveAt = Math.min(keepAliveAt, Math.max(now, sent.sentAt + interval));
        }
      }
    }
    takeLost(now, response.getLostList());
    for (Ticketed asked : sent.tickets) {
      answerConfirm(asked, response.getConfirmedList().contains(asked.token));
    }
    endTrustIfOver(now);
    if (isOfThisStream && !response.getStreamOpen()) {
      reopen(now, "the sidecar has lost our stream");
    } else if (isOfThisStream) {
      failures = 0;
      if (!isReady) {
        isReady = true;
        commands.add(new Ready(instanceId));
      }
    }
  }

  private void keepAliveFailed(long now, int number, AnarchonException.Sidecar why) {
    Unanswered sent = unanswered.remove(number);
    held.clear();
    for (Ticketed asked : sent.tickets) {
      commands.add(
          new AnswerConfirm(
              asked.ticket,
              new AnarchonException.NotConfirmed("the sidecar: " + why.getMessage())));
    }
    if (isFatal(why)) {
      fail(now, why);
    } else if (why instanceof AnarchonException.SessionNotFound && sent.attachedStream == stream) {
      // Trust goes on to its end: a sidecar that has come back adopts what we name.
      keepAliveAt = NEVER;
      if (state == State.ATTACHED) {
        reopen(now, NOT_KNOWN);
      }
    }
  }

  private void receipts(long now, List<String> tokens, CompleteResponse response) {
    isSending = false;
    for (int i = 0; i < tokens.size(); i++) {
      Finished done = finished.get(tokens.get(i));
      if (done == null) {
        continue; // given up meanwhile
      }
      Receipt receipt =
          i < response.getReceiptsCount() ? response.getReceipts(i) : Receipt.getDefaultInstance();
      String refusal = refusalOf(receipt.getStatus());
      if (receipt.getStatus() == ReceiptStatus.RECEIPT_STATUS_RECORDED) {
        finished.remove(tokens.get(i));
      } else if (refusal != null) {
        finished.remove(tokens.get(i));
        String why = receipt.getMessage().isEmpty() ? refusal : receipt.getMessage();
        say(Level.WARNING, "the result of " + done.label + " did not count: " + why);
      } else {
        sendLater(now, done);
      }
    }
  }

  private static String refusalOf(ReceiptStatus status) {
    return switch (status) {
      case RECEIPT_STATUS_FENCED -> "its attempt no longer held the lease";
      case RECEIPT_STATUS_UNKNOWN_TOKEN -> "the sidecar knows no such attempt";
      case RECEIPT_STATUS_ALREADY_COMPLETED -> "another outcome is in the store";
      default -> null;
    };
  }

  private void resultsFailed(long now, List<String> tokens, AnarchonException.Sidecar why) {
    isSending = false;
    for (String token : tokens) {
      Finished done = finished.get(token);
      if (done == null) {
        continue; // given up meanwhile
      }
      if (!(why instanceof AnarchonException.Refused)) {
        sendLater(now, done);
      } else if (tokens.size() > 1) {
        done.alone = true;
      } else {
        finished.remove(token);
        say(Level.ERROR, "the result of " + done.label + " is refused: " + why.getMessage());
      }
    }
  }

  private void leave(long now, long grace) {
    if (!isLeaving) {
      isLeaving = true;
      stopAt = now;
      graceEnd = now + grace;
      if (keepAliveAt != NEVER) {
        keepAliveAt = now;
      }
    }
    // A second request may shorten the grace, never lengthen it.
    graceEnd = Math.min(graceEnd, now + grace);
    long longest =
        running.values().stream().mapToLong(this::cancelGrace).max().orElse(CANCEL_GRACE);
    leaveBy = graceEnd + longest;
  }

  /** Gives the session up: handlers are stopped, their results still reported. */
  private void fail(long now, AnarchonException why) {
    if (error == null) {
      error = why;
    }
    openAt = NEVER;
    keepAliveAt = NEVER;
    leave(now, 0);
  }

  private void sayWhatIsWaitedFor(long now, String hint) {
    if (!running.isEmpty()) {
      Set<String> names = new TreeSet<>();
      long left = 0;
      for (Running run : running.values()) {
        names.add(run.assignment.getJob());
        left = Math.max(left, cancelAt(run) - now);
      }
      String how = left > 0 ? "waiting up to " + text(left) + " for" : "cancelling";
      String what = counted(running.size(), "handler") + " (" + listed(names) + ")";
      say(Level.INFO, "stopping: " + how + " " + what + (hint.isEmpty() ? "" : "; " + hint));
    } else if (!finished.isEmpty()) {
      String what = counted(finished.size(), "result");
      say(
          Level.INFO,
          "stopping: waiting up to " + text(leaveBy - now) + " for " + what + " to be reported");
    }
  }

  // ── What follows from the facts and the time ────────────────────────────────────────────────

  private void advance(long now) {
    if (now >= openAt) {
      open(now);
    }
    startHeld(now);
    cancelWhenLeaving(now);
    giveUpResults(now);
    sendResults(now);
    refuseIdleConfirms();
    boolean isConfirming = unanswered.values().stream().anyMatch(sent -> !sent.tickets.isEmpty());
    if (now >= keepAliveAt || (!confirms.isEmpty() && !isConfirming)) {
      sendKeepAlive(now);
    }
    closeWhenLeft(now);
  }

  private void startHeld(long now) {
    if (now >= trustEnd || isLeaving) {
      return;
    }
    for (Assignment assignment : held.values()) {
      // A handler that ignores a cancellation keeps its place: the sidecar sends it again.
      if (running.size() < request.getMaxConcurrency()) {
        remember(assignment.getToken());
        running.put(assignment.getToken(), new Running(assignment));
        commands.add(new StartHandler(assignment));
      }
    }
    held.clear();
  }

  private void open(long now) {
    openAt = NEVER;
    stream++;
    SubscribeRequest whole = request.toBuilder().addAllInFlight(inFlight()).build();
    if (whole.getSerializedSize() > MESSAGE_MAX_BYTES) {
      fail(now, tooLarge(whole.getSerializedSize()));
      return;
    }
    state = State.SUBSCRIBING;
    commands.add(new OpenStream(stream, whole));
  }

  private void sendKeepAlive(long now) {
    keepAlives++;
    List<Ticketed> tickets = confirms;
    confirms = new ArrayList<>();
    unanswered.put(keepAlives, new Unanswered(now, state == State.ATTACHED ? stream : 0, tickets));
    if (keepAliveAt != NEVER) {
      keepAliveAt = now + interval;
    }
    Set<String> asked = new LinkedHashSet<>();
    tickets.forEach(each -> asked.add(each.token));
    KeepAliveRequest call =
        KeepAliveRequest.newBuilder()
            .setSessionId(request.getSessionId())
            .addAllInFlight(inFlight())
            .setDraining(isLeaving)
            .addAllConfirm(asked)
            .build();
    commands.add(new SendKeepAlive(keepAlives, call, Math.min(interval, KEEP_ALIVE_TIMEOUT_MAX)));
  }

  /** Sends what has no receipt, one batch at a time: what ends meanwhile goes with the next. */
  private void sendResults(long now) {
    if (isSending) {
      return;
    }
    CompleteRequest.Builder batch = CompleteRequest.newBuilder();
    List<String> tokens = new ArrayList<>();
    int size = 0;
    for (Map.Entry<String, Finished> each : finished.entrySet()) {
      Finished done = each.getValue();
      if (now < done.sendAt || (done.alone && !tokens.isEmpty())) {
        continue;
      }
      Result result = Result.newBuilder().setToken(each.getKey()).setOutcome(done.outcome).build();
      size += result.getSerializedSize() + 16; // key and length of a field take less than 16 bytes
      if (!tokens.isEmpty() && size > RESULTS_MAX_BYTES) {
        break;
      }
      tokens.add(each.getKey());
      batch.addResults(result);
      if (done.alone || tokens.size() == RESULTS_MAX) {
        break;
      }
    }
    if (!tokens.isEmpty()) {
      isSending = true;
      commands.add(new SendResults(List.copyOf(tokens), batch.build(), COMPLETE_TIMEOUT));
    }
  }

  private void giveUpResults(long now) {
    Iterator<Finished> all = finished.values().iterator();
    while (all.hasNext()) {
      Finished done = all.next();
      if (now >= done.giveUpAt) {
        all.remove();
        say(
            Level.ERROR,
            "the result of "
                + done.label
                + " could not be reported for "
                + done.repeatFor / 60_000
                + " min, and is given up");
      }
    }
  }

  private void cancelWhenLeaving(long now) {
    if (!isLeaving) {
      return;
    }
    for (Map.Entry<String, Running> each : running.entrySet()) {
      if (!each.getValue().cancelled && now >= cancelAt(each.getValue())) {
        cancel(now, each.getKey(), CancelReason.CANCEL_REASON_SHUTDOWN_VALUE, "", true);
      }
    }
  }

  private void closeWhenLeft(long now) {
    if (!isLeaving || isClosing) {
      return;
    }
    if ((!running.isEmpty() || !finished.isEmpty()) && now < leaveBy) {
      return;
    }
    if (!running.isEmpty()) {
      List<String> labels = new ArrayList<>();
      running.values().forEach(run -> labels.add(labelOf(run.assignment)));
      say(
          Level.ERROR,
          "handlers that did not stop are left to their leases: " + String.join(", ", labels));
    }
    // What came too late to be started has surely stopped.
    List<String> stopped = new ArrayList<>(held.keySet());
    finished.forEach(
        (token, done) -> {
          if (done.outcome.hasStopped()) {
            stopped.add(token);
          } else {
            say(Level.ERROR, "the result of " + done.label + " could not be reported");
          }
        });
    // A session that another process uses is not ours to close.
    if (!wasAttached || error instanceof AnarchonException.SessionReplaced) {
      close();
      return;
    }
    isClosing = true;
    openAt = NEVER;
    keepAliveAt = NEVER;
    CloseSessionRequest call =
        CloseSessionRequest.newBuilder()
            .setSessionId(request.getSessionId())
            .addAllStopped(stopped)
            .build();
    commands.add(new SendClose(call, CLOSE_TIMEOUT));
  }

  private void close() {
    List<Ticketed> asked = new ArrayList<>(confirms);
    unanswered.values().forEach(sent -> asked.addAll(sent.tickets));
    for (Ticketed each : asked) {
      commands.add(
          new AnswerConfirm(
              each.ticket, new AnarchonException.NotConfirmed("the client has stopped")));
    }
    state = State.CLOSED;
    commands.add(new EndStream());
    commands.add(new Closed(error));
  }

  // ── Parts ───────────────────────────────────────────────────────────────────────────────────

  /** Tells people where our own keep-alive is late: what follows is not the sidecar's fault. */
  private void noticeStandstill(long now) {
    if (keepAliveAt != NEVER && now - keepAliveAt >= interval) {
      say(
          Level.WARNING,
          String.format(
              Locale.ROOT,
              "no keep-alive was sent for at least %.1f s: the process stood still, or had no "
                  + "processor to run on",
              (now - keepAliveAt) / 1_000.0));
    }
  }

  private void setTrust(long end) {
    trustEnd = end;
    commands.add(new SetTrust(end));
  }

  private void shortenTrust(long end) {
    if (end < trustEnd) {
      setTrust(end);
    }
  }

  private void endTrustIfOver(long now) {
    if (now < trustEnd) {
      return;
    }
    running.forEach(
        (token, run) -> {
          if (run.lostAt == NEVER) {
            cancel(now, token, LEASE_LOST, Orders.NOT_ANSWERED, false);
          }
        });
  }

  private void takeLost(long now, List<Cancellation> lost) {
    for (Cancellation each : lost) {
      cancel(now, each.getToken(), each.getReasonValue(), each.getMessage(), false);
    }
  }

  private void cancel(long now, String token, int given, String message, boolean trusted) {
    int reason = given == CancelReason.CANCEL_REASON_UNSPECIFIED_VALUE ? LEASE_LOST : given;
    Assignment assignment = held.remove(token);
    if (assignment != null) {
      // It surely never starts, and the sidecar may know it.
      remember(token);
      com.google.protobuf.Duration none = com.google.protobuf.Duration.getDefaultInstance();
      report(now, assignment, stopped(reason).toBuilder().setElapsed(none).build());
    }
    Running run = running.get(token);
    if (run == null) {
      return; // it has ended
    }
    boolean isNews = !run.cancelled || (run.lostAt == NEVER && !trusted);
    run.cancelled = true;
    if (!trusted && run.lostAt == NEVER) {
      run.lostAt = now;
      run.lostBecause = reason;
    }
    if (isNews) {
      commands.add(new CancelHandler(token, reason, message, trusted));
    }
  }

  static Outcome stopped(int reason) {
    return Outcome.newBuilder().setStopped(Stopped.newBuilder().setReasonValue(reason)).build();
  }

  private void report(long now, Assignment assignment, Outcome outcome) {
    finished.put(assignment.getToken(), new Finished(now, assignment, outcome));
  }

  private void sendLater(long now, Finished done) {
    done.sendAt = now + backoff(done.tries++, random.getAsDouble());
  }

  /** Answers at once what no keep-alive could. */
  private void refuseIdleConfirms() {
    List<Ticketed> kept = new ArrayList<>();
    for (Ticketed asked : confirms) {
      AnarchonException lost = lostError(asked.token);
      if (lost != null) {
        commands.add(new AnswerConfirm(asked.ticket, lost));
      } else if (keepAliveAt == NEVER) {
        commands.add(
            new AnswerConfirm(
                asked.ticket, new AnarchonException.NotConfirmed("there is no sidecar now")));
      } else {
        kept.add(asked);
      }
    }
    confirms = kept;
  }

  private void answerConfirm(Ticketed asked, boolean isConfirmed) {
    AnarchonException answer = lostError(asked.token);
    if (answer == null && !isConfirmed) {
      answer = new AnarchonException.NotConfirmed("the store could not renew the lease now");
    }
    commands.add(new AnswerConfirm(asked.ticket, answer));
  }

  /** Returns the error of an attempt that is no longer ours, or null. */
  private AnarchonException lostError(String token) {
    Running run = running.get(token);
    if (run == null) {
      return CancelledException.of(
          io.anarchon.client.CancelReason.LEASE_LOST, "the attempt is over", true);
    }
    return run.lostAt == NEVER
        ? null
        : CancelledException.of(io.anarchon.client.CancelReason.of(run.lostBecause), "", true);
  }

  /** Returns when a handler that still runs is cancelled because the client leaves. */
  private long cancelAt(Running run) {
    JobSpec spec = specs.get(run.assignment.getJob());
    return spec.hasStopGrace()
        ? Math.min(graceEnd, stopAt + Durations.toMillis(spec.getStopGrace()))
        : graceEnd;
  }

  private long cancelGrace(Running run) {
    JobSpec spec = specs.get(run.assignment.getJob());
    return spec.hasCancelGrace() ? Durations.toMillis(spec.getCancelGrace()) : CANCEL_GRACE;
  }

  private boolean isFatal(AnarchonException.Sidecar why) {
    // Call tokens are changed while sessions live: a wrong one is an error of the beginning.
    if (why instanceof AnarchonException.Credentials && wasAttached) {
      return false;
    }
    return why instanceof AnarchonException.SessionReplaced
        || why instanceof AnarchonException.Refused;
  }

  private void setInterval(long wanted) {
    interval = Math.max(wanted, KEEP_ALIVE_INTERVAL_MIN);
  }

  /** Doubles from 100 ms to 5 s, and is drawn from the upper half, so that clients spread. */
  static long backoff(int failures, double drawn) {
    long longest = Math.min(BACKOFF_FIRST << Math.min(failures, 10), BACKOFF_MAX);
    return Math.round(longest * (0.5 + 0.5 * drawn));
  }

  private void remember(String token) {
    if (remembered.size() == request.getMaxConcurrency() + REMEMBERED_BEYOND_CONCURRENCY) {
      known.remove(remembered.removeFirst());
    }
    remembered.addLast(token);
    known.add(token);
  }

  private void say(Level level, String message) {
    commands.add(new Say(level, message));
  }

  static AnarchonException.Refused tooLarge(int size) {
    return new AnarchonException.Refused(
        "the Subscribe request has "
            + size
            + " bytes, and at most "
            + MESSAGE_MAX_BYTES
            + " may be sent: shorten labels, or split the jobs between clients",
        "LIMIT_EXCEEDED");
  }

  private static String text(long millis) {
    return Durations.text(Duration.ofMillis(millis));
  }

  private static String counted(int count, String noun) {
    return count + " " + noun + (count == 1 ? "" : "s");
  }

  private static String listed(Set<String> names) {
    List<String> all = new ArrayList<>(names);
    int more = all.size() - NAMES_SHOWN;
    return more > 0
        ? String.join(", ", all.subList(0, NAMES_SHOWN)) + " and " + more + " more"
        : String.join(", ", all);
  }

  static String labelOf(Assignment assignment) {
    return assignment.getJob() + " " + assignment.getSlot() + " attempt " + assignment.getAttempt();
  }

  /**
   * Returns how long to repeat the result: while the lease can last, the store may still take it.
   *
   * <p>No clock is read. A slot is claimed when it is due, so that from the slot to the lease's end
   * is the lease; for a later attempt it is more, which does no harm.
   */
  private static long repeatFor(Assignment assignment) {
    if (!assignment.hasLeaseEndTime()) {
      return COMPLETE_FOR;
    }
    long end =
        assignment.getLeaseEndTime().getSeconds() * 1_000
            + assignment.getLeaseEndTime().getNanos() / 1_000_000;
    return Math.min(Math.max(end - assignment.getSlot(), COMPLETE_FOR), COMPLETE_FOR_MAX);
  }
}

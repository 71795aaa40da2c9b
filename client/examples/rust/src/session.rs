//! One session with the sidecar. The rules are those of `client/README.md`, whose headings are named here.
//!
//! Everything that happens, an event of the stream, an answer, the end of a handler, becomes a [`Fact`], and one
//! loop takes in fact by fact. Whatever is due by the clock, or can now be sent, is done between two facts.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    process,
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    task::AbortHandle,
};
use tonic::{Code, Request, Status, transport::Channel};
use uuid::Uuid;

use crate::v1::{
    Assignment, CancelReason, Cancellation, ClientInfo, CloseSessionRequest, CompleteRequest,
    Failure, JobSpec, KeepAliveRequest, KeepAliveResponse, Outcome, ReceiptStatus,
    Result as Report, Stopped, SubscribeRequest, Success, outcome,
    session_service_client::SessionServiceClient, subscribe_response::Event,
};

const MAX_CONCURRENCY: usize = 10;
const REMEMBERED: usize = MAX_CONCURRENCY + 1_024;
const MESSAGE_BYTES: usize = 4 << 20;
const STOP_GRACE: Duration = Duration::from_secs(20);
const CANCEL_GRACE: Duration = Duration::from_secs(5);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(200);
const LOOK_AT_THE_CLOCK: Duration = Duration::from_secs(1);

/// The clock of the session: since the machine was started, also while it slept.
fn now() -> Duration {
    #[cfg(target_os = "linux")]
    let clock = ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let clock = ClockId::Monotonic;
    let time = clock_gettime(clock);
    Duration::from_millis(time.tv_sec as u64 * 1_000 + time.tv_nsec as u64 / 1_000_000)
}

/// What can happen. Streams are numbered: what an earlier one says is not heard any more.
enum Fact {
    Event(u64, Event),
    StreamEnded(u64, Status),
    KeptAlive {
        stream: u64,
        sent: Duration,
        answer: Result<KeepAliveResponse, Status>,
    },
    /// None: it was aborted, because it was told to stop.
    HandlerEnded(String, Option<Result<String, Failure>>),
    Completed(String, Result<ReceiptStatus, Status>),
}

/// The stream of this session.
enum Stream {
    Down { again: Duration },
    Opening,
    Attached,
}

/// An attempt in flight: its handler runs, or its outcome has no receipt yet.
struct Attempt {
    began: Duration,
    handler: Option<AbortHandle>,
    /// Why it was told to stop, the first time.
    cancelled: Option<i32>,
    outcome: Option<Outcome>,
    tries: u32,
    report_at: Duration,
}

/// "Back-off": from 100 ms to 5 s, of each pause the upper half.
fn back_off(tries: u32) -> Duration {
    let pause = Duration::from_millis((100 << tries.min(6)).min(5_000));
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}

fn duration(sent: Option<prost_types::Duration>) -> Option<Duration> {
    sent.and_then(|duration| duration.try_into().ok())
}

fn reason(status: &Status) -> &str {
    let trailer = status.metadata().get("anarchon-reason");
    trailer.and_then(|value| value.to_str().ok()).unwrap_or("")
}

pub struct Session<H> {
    client: SessionServiceClient<Channel>,
    id: String,
    job: JobSpec,
    handler: H,
    tell: mpsc::Sender<Fact>,
    facts: mpsc::Receiver<Fact>,

    stream: Stream,
    number: u64,
    listener: Option<AbortHandle>,
    tries: u32,
    was_attached: bool,

    trust_end: Duration,
    interval: Duration,
    keep_alive_at: Option<Duration>,
    newest_answered: Duration,

    attempts: HashMap<String, Attempt>,
    held: VecDeque<Assignment>,
    known: HashSet<String>,
    oldest_first: VecDeque<String>,
    completing: bool,

    /// Leaving: when the grace is over.
    grace_end: Option<Duration>,
    came_too_late: Vec<String>,
    ended_by: Option<Status>,
}

impl<H, F> Session<H>
where
    H: Fn(Assignment) -> F,
    F: Future<Output = Result<String, String>> + Send + 'static,
{
    pub fn new(channel: Channel, job: JobSpec, handler: H) -> Self {
        let (tell, facts) = mpsc::channel(1_000);
        Self {
            client: SessionServiceClient::new(channel)
                .max_decoding_message_size(MESSAGE_BYTES)
                .max_encoding_message_size(MESSAGE_BYTES),
            id: Uuid::new_v4().to_string(),
            job,
            handler,
            tell,
            facts,
            stream: Stream::Down { again: now() },
            number: 0,
            listener: None,
            tries: 0,
            was_attached: false,
            trust_end: Duration::ZERO,
            interval: LOOK_AT_THE_CLOCK,
            keep_alive_at: None,
            newest_answered: Duration::ZERO,
            attempts: HashMap::new(),
            held: VecDeque::new(),
            known: HashSet::new(),
            oldest_first: VecDeque::new(),
            completing: false,
            grace_end: None,
            came_too_late: Vec::new(),
            ended_by: None,
        }
    }

    /// Runs jobs until SIGTERM or SIGINT, or until the sidecar refuses the session: then it gives the error.
    pub async fn run(mut self) -> Result<(), Status> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        while !self.is_over() {
            let due = self.do_what_is_due().saturating_sub(now());
            tokio::select! {
                Some(fact) = self.facts.recv() => {
                    self.look_at_the_clock(); // before any fact is taken in
                    self.take_in(fact);
                }
                _ = terminate.recv() => self.stop(),
                _ = interrupt.recv() => self.stop(),
                _ = tokio::time::sleep(due.min(LOOK_AT_THE_CLOCK)) => {}
            }
        }
        self.close().await;
        self.ended_by.map_or(Ok(()), Err)
    }

    // ── What is due ─────────────────────────────────────────────────────────────────────────────────

    /// Does it, and says when to look again at the latest.
    fn do_what_is_due(&mut self) -> Duration {
        self.look_at_the_clock();
        self.subscribe_if_due();
        if self.keep_alive_at.is_some_and(|at| at <= now()) {
            self.keep_alive();
        }
        self.start_what_is_held();
        self.complete_if_due();

        let mut due = vec![now() + LOOK_AT_THE_CLOCK];
        due.extend(self.keep_alive_at);
        due.extend(self.grace_end.filter(|end| *end > now()));
        due.extend(self.is_trusted().then_some(self.trust_end));
        if let Stream::Down { again } = self.stream {
            due.push(again);
        }
        let waiting = self.attempts.values().filter(|each| each.outcome.is_some());
        due.extend(waiting.map(|each| each.report_at).filter(|_| !self.completing));
        due.into_iter().min().expect("there is always one")
    }

    /// "Trust": what runs when it is over is lost. "Leaving": what runs when the grace is over is cancelled.
    fn look_at_the_clock(&mut self) {
        if !self.is_trusted() {
            self.cancel_all(CancelReason::LeaseLost);
        }
        if self.grace_end.is_some_and(|end| end <= now()) {
            self.cancel_all(CancelReason::Shutdown);
        }
    }

    fn is_trusted(&self) -> bool {
        now() < self.trust_end
    }

    // ── The stream ──────────────────────────────────────────────────────────────────────────────────

    fn subscribe_if_due(&mut self) {
        let Stream::Down { again } = self.stream else {
            return;
        };
        if again > now() || self.ended_by.is_some() {
            return;
        }
        self.stream = Stream::Opening;
        self.number += 1;
        let request = SubscribeRequest {
            session_id: self.id.clone(),
            client: Some(ClientInfo {
                language: "rust".into(),
                version: env!("CARGO_PKG_VERSION").into(),
                process_id: process::id() as i32,
                ..ClientInfo::default()
            }),
            jobs: vec![self.job.clone()],
            max_concurrency: MAX_CONCURRENCY as i32,
            in_flight: self.in_flight(),
        };
        let listening = listen(self.client.clone(), request, self.number, self.tell.clone());
        let listener = tokio::spawn(listening).abort_handle();
        if let Some(earlier) = self.listener.replace(listener) {
            earlier.abort();
        }
    }

    fn stream_is_down(&mut self) {
        self.held.clear();
        if !matches!(self.stream, Stream::Down { .. }) {
            let again = now() + back_off(self.tries);
            self.tries += 1;
            self.stream = Stream::Down { again };
        }
    }

    fn in_flight(&self) -> Vec<String> {
        self.attempts.keys().cloned().collect()
    }

    // ── Facts ───────────────────────────────────────────────────────────────────────────────────────

    fn take_in(&mut self, fact: Fact) {
        match fact {
            Fact::Event(stream, _) | Fact::StreamEnded(stream, _) if stream != self.number => {}
            Fact::Event(_, event) => self.hear(event),
            Fact::StreamEnded(_, status) => {
                if self.tries == 0 {
                    eprintln!("no stream, and I go on trying: {}", status.message());
                }
                self.stream_is_down();
                self.end_if_refused(status);
            }
            Fact::KeptAlive { stream, sent, answer: Ok(answer) } => {
                self.kept_alive(stream, sent, answer);
            }
            Fact::KeptAlive { stream, answer: Err(status), .. } => {
                self.held.clear();
                if stream == self.number && reason(&status) == "SESSION_NOT_FOUND" {
                    self.keep_alive_at = None; // until it is attached again
                    self.stream_is_down();
                }
                self.end_if_refused(status);
            }
            Fact::HandlerEnded(token, result) => self.handler_ended(&token, result),
            Fact::Completed(token, answer) => self.completed(token, answer),
        }
    }

    /// "Events". One that this program does not know is no event to it.
    fn hear(&mut self, event: Event) {
        match event {
            Event::Attached(attached) => {
                println!("attached to {}", attached.instance_id);
                attached.notes.iter().for_each(|note| println!("{note}"));
                self.stream = Stream::Attached;
                self.was_attached = true;
                self.set_interval(duration(attached.keep_alive_interval));
                let ttl = duration(attached.session_ttl).unwrap_or_default();
                self.trust_end = self.trust_end.min(now() + ttl); // it extends none
                self.lose(attached.lost);
                self.keep_alive();
            }
            Event::Runs(runs) => {
                for assignment in runs.assignments {
                    self.assigned(assignment);
                }
            }
            Event::Cancel(Cancellation { token, reason, .. }) => self.cancel(&token, reason),
            Event::Drain(_) => println!("the sidecar is going away"),
        }
    }

    // ── "KeepAlive" and "Trust" ─────────────────────────────────────────────────────────────────────

    fn keep_alive(&mut self) {
        if self.ended_by.is_some() {
            self.keep_alive_at = None;
            return;
        }
        let (sent, stream) = (now(), self.number);
        self.keep_alive_at = Some(sent + self.interval);
        let mut request = Request::new(KeepAliveRequest {
            session_id: self.id.clone(),
            in_flight: self.in_flight(),
            draining: self.grace_end.is_some(),
            confirm: Vec::new(),
        });
        request.set_timeout(self.interval.min(Duration::from_secs(5)));
        let (mut client, tell) = (self.client.clone(), self.tell.clone());
        tokio::spawn(async move {
            let answer = client.keep_alive(request).await.map(|answer| answer.into_inner());
            let _ = tell.send(Fact::KeptAlive { stream, sent, answer }).await;
        });
    }

    fn kept_alive(&mut self, stream: u64, sent: Duration, answer: KeepAliveResponse) {
        let is_present = stream == self.number && matches!(self.stream, Stream::Attached);
        if sent >= self.newest_answered {
            self.newest_answered = sent;
            let until = sent + duration(answer.session_ttl).unwrap_or_default();
            if is_present && answer.stream_open {
                self.trust_end = until;
                self.tries = 0;
            } else {
                self.trust_end = self.trust_end.min(until);
            }
            self.set_interval(duration(answer.keep_alive_interval));
            let next = (sent + self.interval).max(now());
            self.keep_alive_at = self.keep_alive_at.map(|at| at.min(next));
        }
        self.lose(answer.lost);
        if is_present && !answer.stream_open {
            self.stream_is_down();
        }
    }

    fn set_interval(&mut self, interval: Option<Duration>) {
        if let Some(interval) = interval {
            self.interval = interval.max(SHORTEST_INTERVAL);
        }
    }

    // ── "Assignments" ───────────────────────────────────────────────────────────────────────────────

    fn assigned(&mut self, assignment: Assignment) {
        let token = &assignment.token;
        if self.known.contains(token)
            || self.attempts.contains_key(token)
            || self.held.iter().any(|held| held.token == *token)
        {
            return; // it comes more than once
        }
        if self.grace_end.is_some() {
            self.came_too_late.push(assignment.token);
        } else if assignment.job == self.job.name {
            self.held.push_back(assignment);
        } else {
            eprintln!("a run of '{}', which is not ours", assignment.job);
        }
    }

    fn start_what_is_held(&mut self) {
        if !self.is_trusted() {
            return;
        }
        while let Some(assignment) = self.held.pop_front() {
            let running = self.attempts.values().filter(|each| each.handler.is_some());
            if running.count() < MAX_CONCURRENCY {
                self.start(assignment); // otherwise it is sent again
            }
        }
    }

    fn start(&mut self, assignment: Assignment) {
        let token = assignment.token.clone();
        self.remember(&token);
        let handler = tokio::spawn((self.handler)(assignment));
        let attempt = Attempt::new(Some(handler.abort_handle()));
        self.attempts.insert(token.clone(), attempt);
        let tell = self.tell.clone();
        tokio::spawn(async move {
            let result = match handler.await {
                Ok(result) => Some(result.map_err(|message| failure("Error", message))),
                Err(error) if error.is_cancelled() => None,
                Err(panic) => Some(Err(failure("panic", panic.to_string()))),
            };
            let _ = tell.send(Fact::HandlerEnded(token, result)).await;
        });
    }

    fn remember(&mut self, token: &str) {
        self.known.insert(token.into());
        self.oldest_first.push_back(token.into());
        if self.oldest_first.len() > REMEMBERED
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    // ── "Cancellation" ──────────────────────────────────────────────────────────────────────────────

    fn cancel(&mut self, token: &str, reason: i32) {
        if let Some(attempt) = self.attempts.get_mut(token) {
            attempt.cancel(reason);
        } else if let Some(place) = self.held.iter().position(|held| held.token == token) {
            self.held.remove(place);
            self.remember(token);
            let mut attempt = Attempt::new(None);
            attempt.cancelled = Some(reason);
            attempt.end(stopped(reason));
            self.attempts.insert(token.into(), attempt);
        }
    }

    fn cancel_all(&mut self, reason: CancelReason) {
        for attempt in self.attempts.values_mut() {
            attempt.cancel(reason.into());
        }
    }

    /// No longer ours, says the sidecar.
    fn lose(&mut self, lost: Vec<Cancellation>) {
        for Cancellation { token, reason, .. } in lost {
            let known = reason != i32::from(CancelReason::Unspecified);
            self.cancel(&token, if known { reason } else { CancelReason::LeaseLost.into() });
        }
    }

    // ── "Results" ───────────────────────────────────────────────────────────────────────────────────

    fn handler_ended(&mut self, token: &str, result: Option<Result<String, Failure>>) {
        let Some(attempt) = self.attempts.get_mut(token) else {
            return;
        };
        attempt.handler = None;
        attempt.end(match result {
            Some(Ok(result)) => outcome::Result::Success(Success { result: cut(result, 16 << 10) }),
            Some(Err(failure)) => {
                eprintln!("a handler failed: {}", failure.message);
                outcome::Result::Failure(failure)
            }
            None => {
                let reason = attempt.cancelled.unwrap_or_default();
                let name = CancelReason::try_from(reason).unwrap_or_default().as_str_name();
                eprintln!("a handler was stopped: {name}");
                stopped(reason)
            }
        });
    }

    /// One call at a time, with the outcome that has waited longest.
    fn complete_if_due(&mut self) {
        let waiting = self.attempts.iter().filter(|(_, each)| each.outcome.is_some());
        let next = waiting.min_by_key(|(_, each)| each.report_at);
        let Some((token, attempt)) = next.filter(|(_, each)| each.report_at <= now()) else {
            return;
        };
        if std::mem::replace(&mut self.completing, true) {
            return;
        }
        let (token, outcome) = (token.clone(), attempt.outcome.clone());
        let results = vec![Report { token: token.clone(), outcome }];
        let mut request = Request::new(CompleteRequest { results });
        request.set_timeout(Duration::from_secs(10));
        let (mut client, tell) = (self.client.clone(), self.tell.clone());
        tokio::spawn(async move {
            let answer = client.complete(request).await.map(|answer| {
                let receipt = answer.into_inner().receipts.into_iter().next();
                receipt.unwrap_or_default().status()
            });
            let _ = tell.send(Fact::Completed(token, answer)).await;
        });
    }

    fn completed(&mut self, token: String, answer: Result<ReceiptStatus, Status>) {
        use ReceiptStatus::{AlreadyCompleted, Fenced, Recorded, UnknownToken};
        self.completing = false;
        match answer {
            Ok(Recorded) => {}
            Ok(receipt @ (Fenced | UnknownToken | AlreadyCompleted)) => {
                eprintln!("a result did not count: {}", receipt.as_str_name());
            }
            Err(status) if is_refusal(&status) => {
                eprintln!("a result is given up: {}", status.message());
            }
            Ok(_) | Err(_) => {
                if let Some(attempt) = self.attempts.get_mut(&token) {
                    attempt.report_at = now() + back_off(attempt.tries);
                    attempt.tries += 1;
                }
                return;
            }
        }
        self.attempts.remove(&token);
    }

    // ── "Leaving" and "Errors" ──────────────────────────────────────────────────────────────────────

    /// The first signal begins the grace, the second one ends it.
    fn stop(&mut self) {
        let grace = if self.grace_end.is_none() { STOP_GRACE } else { Duration::ZERO };
        println!("stopping, with {} in flight, within {grace:?}", self.attempts.len());
        self.leave(grace);
        if self.keep_alive_at.is_some() {
            self.keep_alive();
        }
    }

    fn leave(&mut self, grace: Duration) {
        let end = now() + grace;
        self.grace_end = Some(self.grace_end.map_or(end, |before| before.min(end)));
        self.came_too_late.extend(self.held.drain(..).map(|held| held.token));
    }

    fn end_if_refused(&mut self, status: Status) {
        let credentials = [Code::Unauthenticated, Code::PermissionDenied].contains(&status.code());
        let is_the_end = is_refusal(&status)
            || reason(&status) == "SESSION_REPLACED"
            || (credentials && !self.was_attached);
        if is_the_end && self.ended_by.is_none() {
            self.ended_by = Some(status);
            self.leave(Duration::ZERO);
        }
    }

    fn is_over(&self) -> bool {
        self.grace_end.is_some_and(|end| self.attempts.is_empty() || now() >= end + CANCEL_GRACE)
    }

    async fn close(&mut self) {
        let replaced =
            self.ended_by.as_ref().is_some_and(|status| reason(status) == "SESSION_REPLACED");
        if !self.was_attached || replaced {
            return;
        }
        let mut stopped = std::mem::take(&mut self.came_too_late);
        let without_receipt = self.attempts.iter().filter(|(_, attempt)| {
            let result = attempt.outcome.as_ref().and_then(|outcome| outcome.result.as_ref());
            matches!(result, Some(outcome::Result::Stopped(_)))
        });
        stopped.extend(without_receipt.map(|(token, _)| token.clone()));
        let session_id = self.id.clone();
        let mut request = Request::new(CloseSessionRequest { session_id, stopped });
        request.set_timeout(Duration::from_secs(5));
        if let Err(status) = self.client.close_session(request).await {
            eprintln!("the session was not closed: {}", status.message());
        }
    }
}

impl Attempt {
    fn new(handler: Option<AbortHandle>) -> Self {
        Self { began: now(), handler, cancelled: None, outcome: None, tries: 0, report_at: now() }
    }

    /// The first reason stays. A handler that has ended does not hear it.
    fn cancel(&mut self, reason: i32) {
        if let (Some(handler), None) = (&self.handler, self.cancelled) {
            self.cancelled = Some(reason);
            handler.abort();
        }
    }

    fn end(&mut self, result: outcome::Result) {
        let elapsed = (now() - self.began).try_into().ok();
        self.outcome = Some(Outcome { elapsed, result: Some(result) });
        self.report_at = now();
    }
}

/// The events of one stream, until it ends.
async fn listen(
    mut client: SessionServiceClient<Channel>,
    request: SubscribeRequest,
    number: u64,
    tell: mpsc::Sender<Fact>,
) {
    let ended = match client.subscribe(request).await {
        Err(status) => status,
        Ok(answer) => {
            let mut stream = answer.into_inner();
            loop {
                match stream.message().await {
                    Ok(Some(message)) => {
                        if let Some(event) = message.event {
                            let _ = tell.send(Fact::Event(number, event)).await;
                        }
                    }
                    Ok(None) => break Status::unavailable("the sidecar has ended it"),
                    Err(status) => break status,
                }
            }
        }
    };
    let _ = tell.send(Fact::StreamEnded(number, ended)).await;
}

/// Whether it is of no use to try again.
fn is_refusal(status: &Status) -> bool {
    let refused = [Code::InvalidArgument, Code::FailedPrecondition, Code::Unimplemented];
    refused.contains(&status.code()) || reason(status) == "LIMIT_EXCEEDED"
}

fn failure(kind: &str, message: String) -> Failure {
    Failure { r#type: kind.into(), message: cut(message, 4 << 10), ..Failure::default() }
}

fn stopped(reason: i32) -> outcome::Result {
    outcome::Result::Stopped(Stopped { reason })
}

/// At most so many bytes, whole characters.
fn cut(mut text: String, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.truncate(end.unwrap_or_default());
    text
}

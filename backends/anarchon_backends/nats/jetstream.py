"""What both backends ask of JetStream: revisions, reads from the leader, and the store's time.

Imports the connection, the store's time, the errors and the standard library. A publish says which
revision of its subject it expects: that is the atomic step. Error codes are those of the server's
`errors.json`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anarchon_backends.nats.connection import Connection
from anarchon_backends.nats.time import StoreTime, microseconds
from anarchon_server.core.errors import OutcomeUnknown, StoreUnavailable

WRONG_SEQUENCE = 10_071
PERHAPS_WRONG_SEQUENCE = 10_164  # of replicated streams: it may refer to what is never committed
STORE_FAILED = 10_077
NO_MESSAGE = 10_037
NO_STREAM = 10_059

# What the server answers before it does anything: surely not done.
_NOT_DONE = frozenset(
    {
        10_002,  # the account's limits are reached
        10_008,  # temporarily unavailable
        10_009,  # no leader: the cluster of servers has none
        10_023,  # insufficient resources
        10_028,  # out of memory for streams
        10_039,  # JetStream is not enabled for the account
        10_047,  # insufficient storage
        10_054,  # the message is larger than the stream takes
        NO_STREAM,
        10_060,  # another stream was expected on the subject
        10_063,  # the stream does not match
        10_076,  # JetStream is not enabled
    }
)
_SUBJECTS_PAGE = 100_000


@dataclass(frozen=True, slots=True)
class Entry:
    """The last message of a subject: `revision` is what a publish that replaces it expects."""

    subject: str
    revision: int
    payload: bytes
    at_us: int


class JetStreamError(StoreUnavailable):
    """JetStream refused: surely not done. `code` is the server's."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


class JetStream:
    """JetStream's API on one connection.

    Answers to `info` of the stream `time_of` measure the store's time (empty: of any stream). Each
    stream's leader answers by its own clock: decisions need one of them.
    """

    def __init__(
        self, connection: Connection, time: StoreTime, domain: str = "", *, time_of: str = ""
    ) -> None:
        self.connection = connection
        self.time = time
        self._time_of = time_of
        self._api = f"$JS.{domain}.API" if domain else "$JS.API"
        self._measured_on = 0

    async def publish(
        self, subject: str, payload: bytes, *, stream: str, expected: int | None, until: float
    ) -> int | None:
        """Writes the subject's next revision, and returns it.

        None: the subject's revision is not `expected` (0: it has no message), or may be another;
        read it. With `expected` None whatever is there is replaced. Raises `StoreUnavailable` where
        surely nothing was written, else `OutcomeUnknown`.
        """
        headers = {"Nats-Expected-Stream": stream}
        if expected is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected)
        data = await self.connection.ask(
            subject, payload, headers=headers, until=until, writes=True
        )
        try:
            answer = json.loads(data)
            if "error" not in answer:
                return int(answer["seq"])
        except (ValueError, KeyError, TypeError):
            raise OutcomeUnknown(
                f"{self.connection.location}: the answer to a publish is not JetStream's"
            ) from None
        error = answer["error"]
        code, text = int(error.get("err_code", 0)), str(error.get("description", ""))
        if code in (WRONG_SEQUENCE, PERHAPS_WRONG_SEQUENCE):
            return None
        if code == STORE_FAILED and "per subject" in text:
            return None
        said = f"{self.connection.location}: {stream}: {text} ({code})"
        if code in _NOT_DONE or (code == STORE_FAILED and text.startswith("maximum ")):
            raise JetStreamError(code, said)
        raise OutcomeUnknown(said)

    async def last(self, stream: str, subject: str, until: float) -> Entry | None:
        """The last message of the subject, from the stream's leader. None: there is none.

        `subject` may have wildcards: then it is the last of all that match.
        """
        try:
            answer = await self.api(f"STREAM.MSG.GET.{stream}", until, {"last_by_subj": subject})
        except JetStreamError as error:
            if error.code == NO_MESSAGE:
                return None
            raise
        found = answer["message"]
        return Entry(
            str(found["subject"]),
            int(found["seq"]),
            base64.b64decode(found.get("data", "")),
            microseconds(found["time"]),
        )

    async def subjects(self, stream: str, pattern: str, until: float) -> list[str]:
        """The subjects of the stream that match and have a message, from its leader, in no order."""
        found: list[str] = []
        while True:
            asked = {"subjects_filter": pattern, "offset": len(found)}
            answer = await self.info(stream, until, asked)
            page = answer.get("state", {}).get("subjects") or {}
            found += page
            if len(page) < _SUBJECTS_PAGE:
                return found

    async def info(
        self, stream: str, until: float, asked: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """The stream as its leader sees it. Measures the store's time, if it is that stream's."""
        asked_ms = self.time.boot_ms()
        answer = await self.api(f"STREAM.INFO.{stream}", until, asked)
        if stream == (self._time_of or stream) and "ts" in answer:
            if self._measured_on != self.connection.generation:
                self._measured_on = self.connection.generation
                self.time.forget()
            self.time.note(microseconds(answer["ts"]), asked_ms)
        return answer

    async def now_us(self, stream: str, until: float, *, measured: bool = False) -> int:
        """The store's time, by the clock of the stream's leader.

        With `measured` it is asked for, else reckoned if it was asked for lately.
        """
        moved = self._measured_on != self.connection.generation
        if measured or moved or not self.time.fresh:
            await self.info(stream, until)
        return self.time.now_us()

    async def purge(self, stream: str, subject: str, until: float) -> None:
        """Removes all messages of the subject, with their place in the list of subjects."""
        await self.api(f"STREAM.PURGE.{stream}", until, {"filter": subject}, writes=True)

    async def api(
        self,
        call: str,
        until: float,
        asked: Mapping[str, object] | None = None,
        *,
        writes: bool = False,
    ) -> dict[str, Any]:
        """One call of the API. Raises `JetStreamError` for an error that it answers."""
        subject = f"{self._api}.{call}"
        payload = json.dumps(asked).encode() if asked else b""
        data = await self.connection.ask(subject, payload, until=until, writes=writes)
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            error = answer["error"]
            code, text = int(error.get("err_code", 0)), str(error.get("description", ""))
            raise JetStreamError(code, f"{self.connection.location}: {call}: {text} ({code})")
        return answer

"""Structured log lines, as text for people or as JSON, that cannot be forged and hold no secrets.

Imports the standard library and `config`. A line is an event, which is a constant, and fields: what
comes from elsewhere stands in fields only. A thread writes them: nobody waits for a reader of
standard error that does not read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from anarchon_server.config import redact

FIELD_MAX_BYTES = 1_024
TRACEBACK_MAX_BYTES = 8 * 1_024

LINES_MAX = 2_000
"""Lines that wait to be written. What comes while there are so many is dropped and counted."""

FLUSH_S = 1.0
"""How long the end of the process waits for the lines that are not written yet."""

# An attempt's token is authority: of its random part 8 digits are enough to tell it from others.
_TOKEN = re.compile(r"\b[0-9]{1,16}\.([0-9a-f]{8})[0-9a-f]{24}\.[A-Za-z0-9._:/-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+\-\[\]*%,]+")


def set_up(
    log_format: str, level: str, secrets: tuple[str, ...] = (), stream: TextIO | None = None
) -> logging.Handler:
    """Send the lines of Anarchon, and warnings of everything else, to standard error.

    Return their handler: its `flush` waits until they are written, but `FLUSH_S` at most.
    """
    handler = LineWriter(stream.write if stream else _to_descriptor(sys.stderr))
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(secrets))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("anarchon").setLevel(level.upper())
    return handler


REFUSED = "refused"
"""The event of a sidecar that cannot go on until somebody changes something."""


def refused(error: Exception) -> None:
    """Say why the sidecar ends: in JSON as an event, in text as the command line says it."""
    logging.getLogger("anarchon").error(REFUSED, extra={"fields": {"error": str(error)}})


class LineWriter(logging.Handler):
    """Lines that a thread writes, in order, with `write`, which may block for as long as it likes."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__()
        self._write = write
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._writing = False
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have the line written, or drop it where too many wait."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)
            return
        with self._changed:
            # Once lines are missing, the line that says so comes first.
            if self._dropped or len(self._lines) >= LINES_MAX:
                self._dropped += 1
            else:
                self._lines.append(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, but `FLUSH_S` at most."""
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._lines or self._dropped or self._writing), FLUSH_S
            )

    def close(self) -> None:
        """Let the thread end once it has written what there is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _write_lines(self) -> None:
        while (line := self._next()) is not None:
            # Where standard error is gone or full, there is nowhere to tell it.
            with contextlib.suppress(OSError):
                self._write(f"{line}\n")

    def _next(self) -> str | None:
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._dropped or self._closed)
            if not (self._lines or self._dropped):
                return None
            self._writing = True
            if self._lines:
                return self._lines.popleft()
            count, self._dropped = self._dropped, 0
        return self.format(_dropped(count))


def _dropped(count: int) -> logging.LogRecord:
    record = logging.LogRecord(
        "anarchon", logging.WARNING, __file__, 0, "log_lines_dropped", None, None
    )
    record.fields = {"count": count}
    return record


def _to_descriptor(stream: TextIO) -> Callable[[str], object]:
    """Return what writes a text to the descriptor of `stream`, past its buffer.

    A thread that is blocked in the buffer would hold its lock, which the end of the process takes.
    """
    descriptor, encoding = stream.fileno(), stream.encoding

    def write(text: str) -> None:
        rest = text.encode(encoding, errors="backslashreplace")
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:
                select.select((), (descriptor,), ())

    return write


class _Formatter(logging.Formatter):
    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._secrets = secrets

    def parts(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the line's fields in order, made safe."""
        at = datetime.fromtimestamp(record.created, UTC)
        parts: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        fields: Mapping[str, Any] | None = getattr(record, "fields", None)
        if fields is None and not record.name.startswith("anarchon"):
            # A library's line: its text may quote anything.
            parts |= {"event": "library", "logger": record.name}
            fields = {"message": record.getMessage()}
        else:
            parts["event"] = record.getMessage()
        parts |= {name: self.safe(value) for name, value in (fields or {}).items()}
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            parts["traceback"] = self.clean(trace, TRACEBACK_MAX_BYTES, keep_end=True)
        return parts

    def safe(self, value: Any) -> Any:
        """Return a value as a log may show it."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, (list, tuple, set, frozenset)):
            return self.clean(", ".join(str(item) for item in value), FIELD_MAX_BYTES)
        return self.clean(str(value), FIELD_MAX_BYTES)

    def clean(self, text: str, most_bytes: int, *, keep_end: bool = False) -> str:
        """Return a text without secrets and tokens, of printable characters, cut to size."""
        text = _TOKEN.sub(r"\1", redact(text, self._secrets))
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        encoded = line.encode()
        if len(encoded) <= most_bytes:
            return line
        cut = encoded[-most_bytes:] if keep_end else encoded[:most_bytes]
        shown = cut.decode(errors="ignore")
        return f"...{shown}" if keep_end else f"{shown}..."


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return json.dumps(self.parts(record), ensure_ascii=True)


class TextFormatter(_Formatter):
    """Time, level, event, and fields as `name=value`; a traceback follows on lines of its own.

    A refusal is the error alone, in the style of every other command.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        parts = self.parts(record)
        if parts["event"] == REFUSED:
            return f"anarchon serve: {parts['error']}"
        trace = parts.pop("traceback", "")
        head = f"{parts.pop('time')} {parts.pop('level').upper():<7} {parts.pop('event')}"
        line = " ".join([head, *(f"{name}={_quoted(value)}" for name, value in parts.items())])
        return f"{line}\n  {trace.replace(chr(92) + 'n', chr(10) + '  ')}" if trace else line


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)

"""Structured log lines, as text for people or as JSON, that cannot be forged and hold no secrets.

Imports the standard library and `config`. A line is an event, which is a constant, and fields: what
comes from elsewhere stands in fields only.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from anarchon_server.config import redact

FIELD_MAX_BYTES = 1_024
TRACEBACK_MAX_BYTES = 8 * 1_024

# An attempt's token is authority: of its random part 8 digits are enough to tell it from others.
_TOKEN = re.compile(r"\b[0-9]{1,16}\.([0-9a-f]{8})[0-9a-f]{24}\.[A-Za-z0-9._:/-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+\-\[\]*%,]+")


def set_up(
    log_format: str, level: str, secrets: tuple[str, ...] = (), stream: TextIO | None = None
) -> None:
    """Send the lines of Anarchon, and warnings of everything else, to standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(secrets))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("anarchon").setLevel(level.upper())


REFUSED = "refused"
"""The event of a sidecar that cannot go on until somebody changes something."""


def refused(error: Exception) -> None:
    """Say why the sidecar ends: in JSON as an event, in text as the command line says it."""
    logging.getLogger("anarchon").error(REFUSED, extra={"fields": {"error": str(error)}})


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

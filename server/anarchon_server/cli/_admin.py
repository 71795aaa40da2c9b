"""What the admin commands share: the call to a sidecar, and how what it says is shown."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from anarchon import ClientError, SidecarError
from anarchon._transport import Endpoint
from anarchon.admin import AdminClient
from anarchon.v1 import run_pb2
from anarchon_server.cli import USAGE_ERROR
from anarchon_server.core.slots import format_duration

FAILED = 1

FINAL = (
    run_pb2.RUN_STATE_SUCCESS,
    run_pb2.RUN_STATE_FAILED,
    run_pb2.RUN_STATE_SKIPPED,
)
"""The states that nothing follows."""

_ROWS_AT_ONCE = 1_000
"""Rows that are kept to be laid out together."""

_SHOWN = 60
"""Characters of a cell that are shown, but in the last column: nothing stands behind it."""


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add what every admin command needs: where the sidecar is, and what opens its door."""
    parser.add_argument(
        "--address",
        metavar="ADDR",
        help="the sidecar: HOST:PORT or unix:/PATH (default: ANARCHON_ADDRESS, or 127.0.0.1:7420)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file with the call token, where one is needed (default: ANARCHON_TOKEN_FILE)",
    )
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="certificates (PEM) to trust, for a sidecar on another machine",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def endpoint_of(args: argparse.Namespace) -> Endpoint:
    """The sidecar that the arguments name. Raises `ClientError`."""
    credentials = None
    if args.tls_ca:
        credentials = grpc.ssl_channel_credentials(_read(args.tls_ca))
    return Endpoint.of(args.address, credentials, args.token_file)


def with_admin(command: str, args: argparse.Namespace, work: Callable[[AdminClient], int]) -> int:
    """Do `work` with the sidecar's admin side; an error becomes one line."""

    def connected() -> int:
        endpoint = endpoint_of(args)
        with AdminClient(
            endpoint.address, token_file=endpoint.token_file, credentials=endpoint.credentials
        ) as admin:
            return work(admin)

    return in_one_line(command, connected)


def say_scope(command: str, admin: AdminClient) -> None:
    """Say on standard error what a list leaves out, where the store keeps no history of others."""
    if not admin.scope:
        return
    who = admin.scope.removeprefix("instance=")
    print(
        f"anarchon {command}: this is only what the instance {printable(who)} knows of itself: its "
        "store keeps no history of the namespace",
        file=sys.stderr,
    )


def in_one_line(command: str, work: Callable[[], int]) -> int:
    """The exit status of `work`; its error as one line on standard error."""
    try:
        return work()
    except ClientError as error:
        print(f"anarchon {command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except SidecarError as error:
        print(f"anarchon {command}: {error}", file=sys.stderr)
        return FAILED


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ClientError(f"--tls-ca {file}: {error.strerror}") from None


def slot_of(text: str) -> int:
    """A slot as it is listed, or in milliseconds since the epoch."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write it as it is listed, 2026-10-10T12:00:10Z, or in milliseconds"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1_000)


# ── Showing ─────────────────────────────────────────────────────────────────────────────────────


def print_json(message: Message, without: str = "") -> None:
    """Print a message as one line: the protocol's names, words in lower case without a prefix.

    `without` names a field that the sidecar did not fill in, and that would mislead.
    """
    shown = plain(message)
    shown.pop(without, None)
    print(json.dumps(shown, ensure_ascii=False), flush=True)


# Descriptors have one type in Python's protobuf and another in its C core: `field` is either.


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON has it. Messages and words that are not set are null."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_value(field, item) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _value(field, value)


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, (Timestamp, Duration)):
        return _time_value(value)
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return word(field, value)
    return value


def _time_value(value: Timestamp | Duration) -> str:
    try:
        return value.ToJsonString()
    except (ValueError, OverflowError):
        # A sidecar of another version sent, or a store kept, what has no text form.
        return f"{value.seconds}s{value.nanos:+d}ns"


def word(field: Any, value: int) -> str | int | None:
    """Return an enumeration's value as a word; None where it is not set, the number of a new one."""
    known = field.enum_type.values_by_number.get(value)
    if value == 0:
        return None
    if known is None:
        return value
    prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(known.name.removeprefix(prefix)).lower()


def word_of(message: Message, name: str) -> str:
    """Return a message's enumeration as a word for a table."""
    found = word(message.DESCRIPTOR.fields_by_name[name], getattr(message, name))
    return "" if found is None else str(found)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns, each as wide as its widest cell; of very many rows, of those up to there."""
    table, left = Table(heads), iter(rows)
    while True:
        some = list(islice(left, _ROWS_AT_ONCE))
        table.print(some)
        if len(some) < _ROWS_AT_ONCE:
            return


class Table:
    """Columns that may go on: each as wide as the widest cell so far."""

    def __init__(self, heads: Sequence[str]) -> None:
        self._heads: Sequence[str] | None = heads
        self._widths = [len(head) for head in heads]

    def print(self, rows: Iterable[Sequence[str]]) -> None:
        """Print rows, at first below the heads."""
        table = [[*map(_cut, row[:-1]), printable(row[-1])] for row in rows]
        if self._heads is not None:
            table.insert(0, list(self._heads))
            self._heads = None
        for row in table:
            self._widths = [max(w, len(c)) for w, c in zip(self._widths, row, strict=True)]
        for row in table:
            cells = (c.ljust(w) for c, w in zip(row, self._widths, strict=True))
            print("  ".join(cells).rstrip(), flush=True)


def _cut(text: str) -> str:
    line = printable(text)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


def printable(text: str) -> str:
    """What a terminal may be shown: one line, no control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown_text(text: str) -> str:
    """Return a text of several lines without other control characters."""
    return "\n".join(map(printable, text.splitlines()))


def shown_slot(slot: int) -> str:
    """Return a slot as people read it, in UTC."""
    return _iso(slot / 1_000)


def shown_time(message: Message, field: str) -> str:
    """Return a time of a message as people read it, or nothing."""
    if not message.HasField(field):
        return ""
    value = getattr(message, field)
    return _iso(value.seconds + value.nanos / 1e9)


def shown_duration(message: Message, start: str, end: str) -> str:
    """Return how long it was from one time of a message to another: "35ms", "2.8s", "1h30m"."""
    if not (message.HasField(start) and message.HasField(end)):
        return ""
    from_ms, to_ms = (getattr(message, field).ToMilliseconds() for field in (start, end))
    elapsed_ms = max(0, to_ms - from_ms)
    if elapsed_ms < 1_000:
        return f"{elapsed_ms}ms"
    if elapsed_ms < 60_000:
        return f"{elapsed_ms / 1_000:.1f}s"
    return format_duration(elapsed_ms // 1_000 * 1_000)


def _iso(seconds: float) -> str:
    try:
        text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds}s since 1970"  # no calendar has it
    return text.replace(".000", "").replace("+00:00", "Z")

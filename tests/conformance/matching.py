"""The scenarios' way of writing messages: how one is made, and how one is compared.

Durations are texts ("1h30m"), enums the last words of their names ("LEASE_LOST") or numbers, bytes
are texts, 64-bit numbers numbers. What is compared is only what is written: `differences` says what
does not fit. Instead of a value may stand

* "$name": bound to what comes where it is met first, and compared with that later;
* `{ bytes = 16384 }`, `{ bytes_at_most = 16384 }`: a text of so many bytes;
* `{ count = 2 }`, `{ more_than = 1 }`: a list of so many; `{ starts = "" }`, `{ ends = "" }`, `{ has = "" }`;
* `{ some = true }`: not empty, not zero;
* `{ json = ... }`: a text that is this value in JSON;
* `{ at_least = 1 }`, `{ at_most = 1 }`: a number, or a duration;
* `{ digits = "1" }`: a number, or a text of its digits; `{ nothing = true }`: null;
* `{ absent = true }`: a field that is not set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from anarchon._duration import to_ms, to_timedelta, wire_to_ms

Bound = dict[str, Any]
UNKNOWN_FIELD = "unknown_field"
"""Adds a field to a message that no version has yet: its value is the field's number."""


# ── Made ────────────────────────────────────────────────────────────────────────────────────────


def made(kind: type[Message], values: Mapping[str, Any], bound: Bound) -> Message:
    """A message with these fields."""
    message = kind()
    _fill(message, values, bound)
    return message


def _fill(message: Message, values: Mapping[str, Any], bound: Bound) -> None:
    for key, value in values.items():
        if key == UNKNOWN_FIELD:
            message.MergeFromString(_unknown(value))
            continue
        field = message.DESCRIPTOR.fields_by_name[key]
        if field.is_repeated:
            target = getattr(message, key)
            for each in value:
                if field.message_type is not None:
                    _fill(target.add(), each, bound)
                else:
                    target.append(_scalar(field, each, bound))
        elif field.message_type is not None:
            _fill_part(getattr(message, key), value, bound)
        else:
            setattr(message, key, _scalar(field, value, bound))


def _fill_part(part: Message, value: Any, bound: Bound) -> None:
    part.SetInParent()
    if isinstance(part, Duration):
        part.FromTimedelta(to_timedelta(value))
    elif isinstance(part, Timestamp):
        part.FromMilliseconds(value)
    else:
        _fill(part, value, bound)


def _scalar(field: Any, value: Any, bound: Bound) -> Any:
    if isinstance(value, str) and value.startswith("$"):
        return bound[value]
    if field.enum_type is not None:
        return _enum_number(field, value)
    return value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value


def _enum_number(field: Any, value: str | int) -> int:
    if isinstance(value, int):
        return value
    (number,) = [each.number for each in field.enum_type.values if _says(each.name, value)]
    return int(number)


def _says(name: str, word: str) -> bool:
    return name == word or name.endswith(f"_{word}")


def _unknown(number: int) -> bytes:
    """A text in a field of this number, as it goes over the wire."""
    key, coded = number << 3 | 2, b""
    while key > 0x7F:
        coded += bytes([key & 0x7F | 0x80])
        key >>= 7
    return coded + bytes([key, 3]) + b"new"


# ── Compared ────────────────────────────────────────────────────────────────────────────────────


def differences(wanted: Any, found: Any, bound: Bound, where: str = "") -> list[str]:
    """What of `wanted` is not so in `found`, a message, a part of one, or what JSON gives.

    Names are bound as they are met, also where something differs: compare with a copy first.
    """
    if isinstance(found, Duration):
        found = wire_to_ms(found)
        if isinstance(wanted, str) and not wanted.startswith("$"):
            wanted = to_ms(to_timedelta(wanted))
    if isinstance(wanted, str) and wanted.startswith("$"):
        wanted = bound.setdefault(wanted, found)
    if isinstance(wanted, Mapping):
        return _of_mapping(wanted, found, bound, where)
    if isinstance(wanted, list):
        return _of_list(wanted, list(found), bound, where)
    if isinstance(found, bytes):
        found = found.decode()
    return [] if wanted == found else [f"{where} is {found!r:.300}, not {wanted!r:.300}"]


def _of_mapping(wanted: Mapping[str, Any], found: Any, bound: Bound, where: str) -> list[str]:
    if wanted.keys() & _TESTS.keys():
        return [
            f"{where} is {found!r:.300}, not {key} {value!r:.300}"
            for key, value in wanted.items()
            if not _TESTS[key](value, found)
        ]
    said = []
    for key, value in wanted.items():
        at = f"{where}.{key}" if where else key
        absent = isinstance(value, Mapping) and "absent" in value
        if isinstance(found, Message) and not isinstance(found, Mapping):
            said += _of_field(value, found, key, bound, at, absent=absent)
        elif absent or key not in found:
            said += [f"{at} is {'there' if absent else 'not there'}"] * (absent == (key in found))
        else:
            said += differences(value, found[key], bound, at)
    return said


def _of_field(
    wanted: Any, message: Message, key: str, bound: Bound, where: str, *, absent: bool
) -> list[str]:
    field = message.DESCRIPTOR.fields_by_name[key]
    if absent or field.has_presence:
        is_there = message.HasField(key) if field.has_presence else bool(getattr(message, key))
        if absent or not is_there:
            return [] if is_there != absent else [f"{where} is {'' if is_there else 'not '}set"]
    found = getattr(message, key)
    if field.enum_type is not None and isinstance(wanted, str) and not wanted.startswith("$"):
        known = field.enum_type.values_by_number.get(found)
        name = known.name if known else str(found)
        return [] if _says(name, wanted) else [f"{where} is {name}, not {wanted}"]
    return differences(wanted, found, bound, where)


def _of_list(wanted: list[Any], found: list[Any], bound: Bound, where: str) -> list[str]:
    """Texts in any order, everything else in its own."""
    wanted = [bound.get(each, each) if isinstance(each, str) else each for each in wanted]
    if all(isinstance(each, str) for each in wanted + found):
        wanted, found = sorted(wanted), sorted(found)
    if len(wanted) != len(found):
        return [f"{where} is {found!r:.300}, not {wanted!r:.300}"]
    pairs = zip(wanted, found, strict=True)
    return [
        line
        for index, (one, other) in enumerate(pairs)
        for line in differences(one, other, bound, f"{where}[{index}]")
    ]


def _is_json(wanted: Any, text: str) -> bool:
    try:
        return bool(json.loads(text) == wanted)
    except ValueError:
        return False


def _number(value: Any) -> Any:
    return to_ms(to_timedelta(value)) if isinstance(value, str) else value


_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "bytes": lambda wanted, found: len(found.encode()) == wanted,
    "bytes_at_most": lambda wanted, found: len(found.encode()) <= wanted,
    "count": lambda wanted, found: len(found) == wanted,
    "more_than": lambda wanted, found: len(found) > wanted,
    "starts": lambda wanted, found: found.startswith(wanted),
    "ends": lambda wanted, found: found.endswith(wanted),
    "has": lambda wanted, found: wanted in found,
    "json": _is_json,
    "digits": lambda wanted, found: str(found) == wanted,
    "nothing": lambda _, found: found is None,
    "some": lambda _, found: bool(found),
    "at_least": lambda wanted, found: _number(found) >= _number(wanted),
    "at_most": lambda wanted, found: _number(found) <= _number(wanted),
}

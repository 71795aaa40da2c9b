"""The machine's and the model's records as JSON, and back.

What the store keeps is input: nothing in it is trusted. A field that has its default is left out,
so that records are small and those of earlier versions can be read. Imports the model, the errors
and the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from anarchon_server.core.errors import StoreUnavailable

_T = TypeVar("_T")


class Unreadable(StoreUnavailable):
    """A record is not as Anarchon writes it: somebody else wrote or changed it."""


def encode(value: object) -> bytes:
    """JSON as the store keeps it. Whatever a handler said is kept, also half of a character."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def decode(what: str, data: bytes, read: Callable[[Any], _T]) -> _T:
    """What `encode` wrote, as `read` makes it of the JSON value. `what` names it to people."""
    try:
        return read(json.loads(data.decode("utf-8", "surrogatepass")))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise Unreadable(
            f"{what} in the store is not as Anarchon writes it ({type(error).__name__}: {error}): "
            "somebody else wrote or changed it"
        ) from error


def plain(record: Any) -> dict[str, Any]:
    """A record as a JSON object: the fields that do not have their default."""
    shown: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            shown[field.name] = _plain_value(value)
    return shown


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(each) for each in value]
    return plain(value) if is_dataclass(value) else value


def record_of(kind: type[_T], values: Mapping[str, Any], **known: Any) -> _T:
    """The record that `plain` showed; `known` are fields that it does not say.

    Fields of later versions are ignored. Raises `ValueError` or `TypeError` for what is none.
    """
    readers = _readers(cast("Hashable", kind))
    read = {name: readers[name](value) for name, value in values.items() if name in readers}
    return kind(**(read | known))


@cache
def _readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    return {name: _reader(hint) for name, hint in get_type_hints(kind).items()}


def _reader(kind: Any) -> Callable[[Any], Any]:
    if get_origin(kind) is UnionType:
        (inner,) = [_reader(each) for each in get_args(kind) if each is not type(None)]
        return lambda value: None if value is None else inner(value)
    if get_origin(kind) is tuple:
        each = _reader(get_args(kind)[0])
        return lambda value: tuple(each(item) for item in _exactly(list, value))
    if is_dataclass(kind):
        return partial(record_of, cast("type[Any]", kind))
    if issubclass(kind, StrEnum):
        return cast("Callable[[Any], Any]", kind)
    return partial(_exactly, kind)


def _exactly(kind: type[_T], value: object) -> _T:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, found {str(value)[:40]!r}")
    return value

"""Values that are never shown, and how text that may quote them is cleaned. Imports the standard
library only.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

HIDDEN = "***"

# `user:password@` of any URL: up to the last "@" of a word, since drivers quote raw passwords.
_USER_INFO = re.compile(r"(://[^\s/:@]*):\S*@")
_PARAMETER = re.compile(r"(?i)\b((?:ssl)?password|passwd|pwd|token|secret)=([^\s&;,'\"]+)")
_SHORTEST_KNOWN = 4


class Secret:
    """A text that `repr`, `str` and f-strings show as `***`. `reveal` gives it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the text itself, for the one who needs it."""
        return self._value

    @property
    def parts(self) -> tuple[str, ...]:
        """What must not appear anywhere: the password of a URL, as written and as it is meant."""
        try:
            password = urlsplit(self._value).password or ""
        except ValueError:
            return (self._value,)
        return tuple(p for p in {password, unquote(password)} if len(p) >= _SHORTEST_KNOWN)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return HIDDEN

    def __bool__(self) -> bool:
        return bool(self._value)


def redact(text: str, known: tuple[str, ...] = ()) -> str:
    """Return `text` without passwords: those of URLs, `password=...`, and those in `known`."""
    for part in known:
        text = text.replace(part, HIDDEN)
    text = _USER_INFO.sub(rf"\1:{HIDDEN}@", text)
    return _PARAMETER.sub(rf"\1={HIDDEN}", text)

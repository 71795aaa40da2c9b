"""Names as single tokens of a subject, and back.

Imports the standard library. A token may hold anything but `.`, `*`, `>`, blanks and control
characters; names may hold `.`, and whatever else is not plain is encoded the same way.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

_PLAIN = ":/_-@+="


def token(name: str) -> str:
    """The name as one token: `.` and whatever is special as %XX. Different names stay different."""
    assert name, "an empty token is none"
    return quote(name, safe=_PLAIN).replace(".", "%2E").replace("~", "%7E")


def name(encoded: str) -> str:
    """The name that `token` encoded."""
    return unquote(encoded)

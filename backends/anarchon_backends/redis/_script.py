"""A Lua script, as a server knows it.

Imports the standard library only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the digest by which the server knows it."""

    source: str
    sha: str


def script_of(source: str) -> Script:
    """The script with this text."""
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())

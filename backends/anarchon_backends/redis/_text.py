"""Text as a server keeps it, which answers with bytes.

Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable


def encode(text: str) -> bytes:
    """Text as the store keeps it. Whatever a handler said is kept, also half of a character."""
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes) -> str:
    """The text that `encode` wrote."""
    return data.decode("utf-8", "surrogatepass")


def decoded(pairs: Iterable[bytes]) -> dict[str, str]:
    """The answer to HGETALL."""
    flat = [decode(each) for each in pairs]
    return dict(zip(flat[::2], flat[1::2], strict=True))

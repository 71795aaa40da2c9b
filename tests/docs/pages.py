"""The project's Markdown pages: their links, headings and code blocks. Imports the standard library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "proto", "client", "server", "backends", "deploy", "tests", "bench")

_FENCE = re.compile(r"(?ms)^```([^\n]*)\n(.*?)^```\s*$")
_LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"(?m)^#{1,6} +(.+?) *$")
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the words after it, its text, the line it begins at."""

    page: Path
    language: str
    words: tuple[str, ...]
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page of the project."""
    inner = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *(p for p in inner if "node_modules" not in p.parts)])


def blocks(page: Path, language: str) -> list[Block]:
    """The page's blocks in one language."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        name, *words = match[1].split() or [""]
        if name == language:
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, name, tuple(words), match[2], line))
    return found


def links(page: Path) -> list[str]:
    """Where the page's links go, code left out."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", text))


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link may say after # for this page, as GitHub makes it of the headings."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found: dict[str, int] = {}
    names = []
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = _NOT_IN_ANCHORS.sub("", plain.lower()).replace(" ", "-")
        times = found.get(name, 0)
        found[name] = times + 1
        names.append(f"{name}-{times}" if times else name)
    return frozenset(names)

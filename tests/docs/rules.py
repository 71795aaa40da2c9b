"""The rules of docs/semantics.md, read from the page, from the code it points at and from the tests
that cite them. Run as a program it writes the page's Tests lines anew. Imports the standard library.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEMANTICS = ROOT / "docs" / "semantics.md"

PREFIXES = {
    "core": "server/anarchon_server/core",
    "server": "server/anarchon_server",
    "backends": "backends/anarchon_backends",
    "anarchon": "client/python/anarchon",
}
"""How pages shorten the names of packages, and where those are."""

STATUSES = ("whole", "in part", "not yet")

_HEADING = re.compile(r"### ([SI]\d+a?) (.+)")
_REFERENCE = re.compile(r"`((?:core|server|backends|anarchon)(?:\.\w+)+:[\w.]+)`")
_RULE = re.compile(r"\b([SI])(\d+)(a?)\b(?: to \1(\d+)\b)?")
_IN_NAME = re.compile(r"(?<![a-z0-9])([si])(\d+)(a?)(?:_to_\1(\d+))?(?=_|$)")
_LINK = re.compile(r"\]\(\.\./([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as the page has it: its status, the code it points at, the test files it names."""

    number: str
    title: str
    status: str
    code: tuple[str, ...]
    tests: tuple[str, ...]


def rules() -> list[Rule]:
    """Every rule and invariant, in the page's order."""
    found: list[Rule] = []
    for section in re.split(r"(?m)^(?=### )", SEMANTICS.read_text(encoding="utf-8"))[1:]:
        heading = _HEADING.match(section)
        if heading is None:
            raise ValueError(f"a section without a rule's number: {section.splitlines()[0]!r}")
        lines = {
            key: text
            for key in ("This version", "Code", "Tests")
            for text in re.findall(rf"(?m)^- \*\*{key}:\*\*(.*)$", section)
        }
        found.append(
            Rule(
                number=heading[1],
                title=heading[2],
                status=lines["This version"].strip(),
                code=tuple(references(lines["Code"])),
                tests=tuple(_LINK.findall(lines["Tests"])),
            )
        )
    return found


# ── Tests that cite ─────────────────────────────────────────────────────────────────────────────


@cache
def citing_files() -> dict[str, frozenset[str]]:
    """For every rule that is cited: the files, from the root, with a test that cites it."""
    citing: dict[str, set[str]] = {}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if file.parent != Path(__file__).parent:
            for number in cited_in(file.read_text(encoding="utf-8")):
                citing.setdefault(number, set()).add(file.relative_to(ROOT).as_posix())
    return {number: frozenset(files) for number, files in citing.items()}


def cited_in(source: str) -> frozenset[str]:
    """The rules cited by the name or the docstring of a test, or of a class of tests."""
    cited: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            node.name.lower().startswith("test")
        ):
            cited.update(cited_by(node.name, ast.get_docstring(node) or ""))
    return frozenset(cited)


def cited_by(name: str, *documents: str) -> frozenset[str]:
    """The rules cited by the name of one test, and by its docstring and that of its class."""
    cited = set(_numbers(_IN_NAME, name))
    for document in documents:
        cited.update(_numbers(_RULE, document))
    return frozenset(cited)


def _numbers(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """The rules in a text, as in "S7", "S21a", "I1 to I8"."""
    for kind, first, letter, last in pattern.findall(text):
        yield f"{kind.upper()}{int(first)}{letter}"
        if last:
            yield from (f"{kind.upper()}{n}" for n in range(int(first), int(last) + 1))


# ── Code that is pointed at ─────────────────────────────────────────────────────────────────────


def references(text: str) -> list[str]:
    """The code a text points at, each as `package.module:name`."""
    return _REFERENCE.findall(text)


def stands(reference: str) -> bool:
    """Whether the name is there. The code is read, not imported."""
    module, _, name = reference.partition(":")
    source = _source(module)
    if source is None:
        return False
    body = _parsed(source).body
    *owners, last = name.split(".")
    for owner in owners:
        found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == owner]
        if not found:
            return False
        body = found[0].body
    return any(last in _names(node) for node in body)


def _source(module: str) -> Path | None:
    package, *inner = module.split(".")
    place = ROOT.joinpath(PREFIXES[package], *inner)
    for source in (place.with_suffix(".py"), place / "__init__.py"):
        if source.is_file():
            return source
    return None


@cache
def _parsed(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case _:
            return []


# ── The page, written ───────────────────────────────────────────────────────────────────────────


def with_tests(text: str) -> str:
    """The page's text with the Tests line of every rule written anew."""
    number = ""
    lines: list[str] = []
    for old in text.splitlines():
        line = old
        if heading := _HEADING.match(line):
            number = heading[1]
        if line.startswith("- **Tests:**"):
            files = sorted(citing_files().get(number, ()))
            line = "- **Tests:** " + (", ".join(map(_linked, files)) or "none")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _linked(file: str) -> str:
    shown = file.removeprefix("tests/").removesuffix(".py")
    return f"[{shown}]({os.path.relpath(file, 'docs')})"


if __name__ == "__main__":
    SEMANTICS.write_text(with_tests(SEMANTICS.read_text(encoding="utf-8")), encoding="utf-8")
    missing = [r.number for r in rules() if not r.tests and not r.status.startswith("not yet")]
    sys.exit(f"no test cites {', '.join(missing)}" if missing else 0)

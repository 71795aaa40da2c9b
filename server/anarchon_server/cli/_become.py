"""Becomes the parent of a command, which dies with `anarchon exec`, and so does what it started.

A program of its own (`python -I -S _become.py PARENT COMMAND [ARG ...]`), since between fork and
exec of a program with threads nothing but exec is safe. The command leads a process group. SIGTERM
is handed on to that group, SIGUSR1 kills it, and so does the end of PARENT: PR_SET_PDEATHSIG on the
command alone would leave what a shell has started. It ends as the command does.

After any of the three nothing that the command started is left, also where it went into a session
of its own: orphans become our children (PR_SET_CHILD_SUBREAPER), and are killed. A command that
ends by itself leaves such processes alone: it may have been there to start a daemon.

Linux. Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_OURS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD)
_OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored by Python from its start on, which a command would inherit."""


def main() -> NoReturn:
    """Run the command; never returns."""
    parent, line = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Waited for, and not handled: none is missed on the way into a call that waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    _die_with_parent(signal.SIGHUP)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(137)
    child = os.fork()
    if child == 0:
        _become(line, before)
    with suppress(OSError):
        os.setpgid(child, child)
    was_told = False
    # Not reaped by this look at it: until then nobody else can have its number.
    while not _has_ended(child):
        number = signal.sigwait(_OURS)
        if os.getppid() != parent:
            was_told = True
            break
        if number in (signal.SIGTERM, signal.SIGUSR1):
            was_told = True
            _signal(child, signal.SIGKILL if number == signal.SIGUSR1 else signal.SIGTERM)
    _signal(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if was_told:
        _kill_the_rest()
    _end_as(status)


def _has_ended(child: int) -> bool:
    """Whether the command has; orphans that have ended are reaped meanwhile, as init would."""
    how = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while (ended := os.waitid(os.P_ALL, 0, how)) is not None:
        if ended.si_pid == child:
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _kill_the_rest() -> None:
    """Kill what left the group. With each that dies its children become ours, until none is left."""
    while killed := [pid for pid in _children() if _kill(pid)]:
        for pid in killed:
            os.waitpid(pid, 0)


def _kill(pid: int) -> bool:
    """Kill a child; False for one that has become another user's."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _children() -> Iterator[int]:
    ours = str(os.getpid())
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            # The name stands in brackets and may hold anything; the state and the parent follow.
            fields = process.joinpath("stat").read_bytes().rpartition(b")")[2].split()
            if fields[1].decode() == ours:
                yield int(process.name)


def _become(line: list[str], mask: set[int | signal.Signals]) -> NoReturn:
    os.setpgid(0, 0)
    _die_with_parent(signal.SIGKILL)
    for number in _OF_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(line[0], line)
    except OSError as error:
        print(f"anarchon exec: {line[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _die_with_parent(number: signal.Signals) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        sys.exit(f"anarchon exec: prctl: {os.strerror(ctypes.get_errno())}")


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_as(status: int) -> NoReturn:
    if status >= 0:
        os._exit(status)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # the command's core is enough
    with suppress(OSError):  # SIGKILL cannot be set
        signal.signal(-status, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
    os.kill(os.getpid(), -status)
    os._exit(128 - status)


if __name__ == "__main__":
    main()

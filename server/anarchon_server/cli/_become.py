"""Becomes the parent of a command, which dies with `anarchon exec`, and so does what it started.

A program of its own (`python -I -S _become.py PARENT COMMAND [ARG ...]`), since between fork and
exec of a program with threads nothing but exec is safe. The command leads a process group. SIGTERM
is handed on to that group, SIGUSR1 kills it, and so does the end of PARENT: PR_SET_PDEATHSIG on the
command alone would leave what a shell has started. It ends as the command does.

Linux. Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
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
    if os.getppid() != parent:
        os._exit(137)
    child = os.fork()
    if child == 0:
        _become(line, before)
    with suppress(OSError):
        os.setpgid(child, child)
    # Not reaped by this look at it: until then nobody else can have its number.
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        number = signal.sigwait(_OURS)
        if os.getppid() != parent:
            break
        if number in (signal.SIGTERM, signal.SIGUSR1):
            _signal(child, signal.SIGKILL if number == signal.SIGUSR1 else signal.SIGTERM)
    _signal(child, signal.SIGKILL)
    _end_as(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


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
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number) != 0:
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

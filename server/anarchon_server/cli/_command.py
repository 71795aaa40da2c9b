"""A command as a handler: started in a process group of its own, which dies with us.

Imports the client's public names and the standard library.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta

from anarchon import Context

TAIL_BYTES = 16 * 1024
"""How much of the end of the output is kept."""

_CHUNK = 64 * 1024
_PR_SET_PDEATHSIG = 1

# Run by a Python of its own, which then becomes the command: between fork and exec of a program
# with threads nothing but exec is safe. What it is given: our process, and the command line.
_BECOME = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(1, signal.SIGKILL) != 0:
    sys.exit("anarchon exec: prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != parent:
    os._exit(137)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"anarchon exec: {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


class ExitStatus(Exception):  # noqa: N818 - what history shows as the error's class
    """The command ended with a status other than 0, or by a signal."""

    __module__ = "builtins"  # shown without a module, which says nothing to anybody


def can_die_with_us() -> bool:
    """Whether a command can be made to die with this process: on Linux, by PR_SET_PDEATHSIG."""
    if sys.platform != "linux":
        return False
    return hasattr(ctypes.CDLL(None), "prctl")


class Command:
    """A handler that runs a command line, without a shell.

    `grace` is how long the command may take to obey SIGTERM before it is killed.
    """

    def __init__(self, line: list[str], grace: timedelta) -> None:
        self._line = line
        self._grace = grace
        self.__name__ = line[0]

    async def __call__(self, ctx: Context) -> str:
        """Return the end of the output. Raises `ExitStatus`."""
        process = await asyncio.create_subprocess_exec(
            *self._arguments(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment_of(ctx),
            start_new_session=True,
        )
        assert process.stdout is not None
        tail = asyncio.create_task(_tail_of(process.stdout))
        try:
            await process.wait()
        except asyncio.CancelledError:
            await self._end(process)
            raise
        finally:
            # What the command left running may keep the output open: nobody waits for that.
            _signal_group(process, signal.SIGKILL)
            output = await _what_came(tail)
        if process.returncode == 0:
            return output
        raise _failed(process.returncode, output)

    def _arguments(self) -> list[str]:
        if not can_die_with_us():
            return self._line
        return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *self._line]

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """SIGTERM to the whole group, and SIGKILL to what is left after the grace."""
        _signal_group(process, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), self._grace.total_seconds())
        _signal_group(process, signal.SIGKILL)
        await process.wait()


def environment_of(ctx: Context) -> dict[str, str]:
    """What the command may know: of the run, but never the token that opens the sidecar."""
    hidden = ("ANARCHON_TOKEN_FILE", "ANARCHON_STORE")
    inherited = {key: value for key, value in os.environ.items() if key not in hidden}
    return inherited | {
        "ANARCHON_JOB": ctx.job,
        "ANARCHON_SLOT": str(ctx.slot),
        "ANARCHON_ATTEMPT": str(ctx.attempt),
        "ANARCHON_RUN_TOKEN": ctx.token,
        "ANARCHON_FENCE": str(ctx.fence),
    }


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _tail_of(stream: asyncio.StreamReader) -> bytes:
    """Read everything, hand it on, and keep the end."""
    tail = b""
    while chunk := await stream.read(_CHUNK):
        with suppress(OSError, ValueError):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        tail = (tail + chunk)[-TAIL_BYTES:]
    return tail


async def _what_came(tail: asyncio.Task[bytes]) -> str:
    return (await tail).decode("utf-8", "replace").strip()


def _failed(status: int | None, output: str) -> ExitStatus:
    assert status is not None, "it has ended"
    how = f"exit status {status}"
    if status < 0:
        how = f"killed by {signal.Signals(-status).name}"
    error = ExitStatus(how)
    if output:
        error.add_note(output)
    return error

"""A command as a handler: started in a process group of its own, which dies with us.

Imports the client and the standard library.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

from anarchon import Context
from anarchon._errors import ForeignError

TAIL_BYTES = 16 * 1024
"""How much of the end of the output is kept."""

_CHUNK = 64 * 1024
_PIPE_MAX = 1024 * 1024
"""More cannot wait in a pipe."""

_WAITING_MAX = 64
"""Chunks that wait for standard output to be read."""

_FLUSH_S = 1.0


class ExitStatus(ForeignError):  # noqa: N818 - what history shows as the error's class
    """The command ended with a status other than 0, or by a signal. Its details are the output."""

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
        self._has_parent = can_die_with_us()
        self._passing_on = _PassingOn()
        self.__name__ = line[0]

    async def __call__(self, ctx: Context) -> str:
        """Return the end of the output. Raises `ExitStatus`."""
        output = _Output(self._passing_on)
        try:
            with _input_of(ctx) as payload:
                process = await asyncio.create_subprocess_exec(
                    *self._arguments(),
                    stdin=payload,
                    stdout=output.write_end,
                    stderr=asyncio.subprocess.STDOUT,
                    env=environment_of(ctx),
                    start_new_session=True,
                )
        except BaseException:
            output.end()
            raise
        finally:
            os.close(output.write_end)
        output.begin()
        try:
            await process.wait()
        except asyncio.CancelledError:
            await self._end(process)
            raise
        finally:
            self._signal(process, signal.SIGKILL)
            said = output.end()
        if process.returncode == 0:
            return said
        raise _failed(process.returncode, said)

    def flush(self) -> None:
        """Wait a moment for standard output to be read."""
        self._passing_on.flush()

    def _arguments(self) -> list[str]:
        if not self._has_parent:
            return self._line
        become = str(Path(__file__).with_name("_become.py"))
        return [sys.executable, "-I", "-S", become, str(os.getpid()), *self._line]

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """SIGTERM to the whole group, and SIGKILL to what is left after the grace."""
        self._signal(process, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), self._grace.total_seconds())
        self._signal(process, signal.SIGKILL)
        await process.wait()

    def _signal(self, process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        """To the command's whole group; by way of its parent, which has killed what is left of it
        before it ends.
        """
        with suppress(ProcessLookupError, PermissionError):
            if not self._has_parent:
                os.killpg(process.pid, number)
            elif process.returncode is None:
                os.kill(process.pid, signal.SIGUSR1 if number == signal.SIGKILL else number)


@contextmanager
def _input_of(ctx: Context) -> Iterator[int | IO[bytes]]:
    """What the command reads: the payload of a run that was triggered with one, else nothing.

    A file, as what fits into a pipe is not the same everywhere.
    """
    if not ctx.payload:
        yield asyncio.subprocess.DEVNULL
        return
    with tempfile.TemporaryFile() as file:
        file.write(ctx.payload)
        file.seek(0)
        yield file


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
        "ANARCHON_TRIGGER": ctx.trigger.value,
    }


class _PassingOn:
    """Writes to standard output in a thread, so that nothing else waits where nobody reads it."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[bytes, Callable[[], object]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        """Whether too much waits already."""
        return self._waiting.qsize() >= _WAITING_MAX

    def write(self, chunk: bytes, then: Callable[[], object]) -> None:
        """Write `chunk`; `then` is called in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, daemon=True)
            self._thread.start()
        self._waiting.put((chunk, then))

    def flush(self) -> None:
        written = threading.Event()
        self.write(b"", written.set)
        written.wait(_FLUSH_S)

    def _write_all(self) -> None:
        while True:
            chunk, then = self._waiting.get()
            with suppress(OSError):
                while chunk:
                    chunk = chunk[os.write(sys.stdout.fileno(), chunk) :]
            then()


class _Output:
    """What a command writes: handed on, and its end kept.

    A pipe of our own: nobody waits for the end of one that a process outside the group holds open.
    """

    def __init__(self, passing_on: _PassingOn) -> None:
        self._passing_on = passing_on
        self._loop = asyncio.get_running_loop()
        self._tail = b""
        self._ended = False
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)

    def begin(self) -> None:
        if not self._ended:
            self._loop.add_reader(self._read_end, self._take)

    def end(self) -> str:
        """The end of what came until now."""
        self._ended = True
        self._loop.remove_reader(self._read_end)
        left = _PIPE_MAX
        while left > 0 and (chunk := self._chunk()):
            left -= len(chunk)
            if not self._passing_on.is_full:
                self._passing_on.write(chunk, _nothing)
        os.close(self._read_end)
        # In UTF-8 each byte that is no text becomes three.
        text = self._tail.decode("utf-8", "replace").strip()
        return text.encode()[-TAIL_BYTES:].decode("utf-8", "ignore")

    def _take(self) -> None:
        """Hand a chunk on; the next one is read once it is written."""
        self._loop.remove_reader(self._read_end)
        if chunk := self._chunk():
            self._passing_on.write(chunk, self._written)
        elif chunk is None:
            self.begin()

    def _written(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.begin)

    def _chunk(self) -> bytes | None:
        """What is there; empty at the end, None where there may be more."""
        try:
            chunk = os.read(self._read_end, _CHUNK)
        except BlockingIOError:
            return None
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        return chunk


def _nothing() -> None: ...


def _failed(status: int | None, output: str) -> ExitStatus:
    assert status is not None, "it has ended"
    how = f"exit status {status}"
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}
        how = f"killed by {names.get(-status, f'signal {-status}')}"
    return ExitStatus(how, output)

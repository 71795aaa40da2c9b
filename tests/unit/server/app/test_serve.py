"""`anarchon serve` as a process: one clear line at start, one clear line where it cannot."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from anarchon_server import cli
from anarchon_server.app import REFUSED
from anarchon_server.config import Config

WAIT_S = 20


class Process:
    """A sidecar process whose log lines can be waited for."""

    def __init__(self, *flags: str, environ: Mapping[str, str], directory: Path) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ANARCHON_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "anarchon_server", "serve", *flags],
            env=clean | {"HOME": str(directory), "XDG_STATE_HOME": ""} | dict(environ),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: Queue[str | None] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def line_with(self, text: str) -> str:
        """The next line that has this text."""
        while (line := self._queue.get(timeout=WAIT_S)) is not None:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r} in {self.lines}")

    def ended(self) -> int:
        """The exit status; `lines` has all of the output."""
        status = self.popen.wait(timeout=WAIT_S)
        while (line := self._queue.get(timeout=WAIT_S)) is not None:
            self.lines.append(line)
        return status

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(timeout=WAIT_S)
        self._reader.join(timeout=WAIT_S)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


Serve = Callable[..., Process]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[Process] = []

    def start(*flags: str, **environ: str) -> Process:
        started.append(Process(*flags, environ=environ, directory=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_one_line_says_what_is_served_and_the_default_stores_directory_is_made(
    serve: Serve, tmp_path: Path
) -> None:
    sidecar = serve("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--instance-id", "a:1")
    line = sidecar.line_with("serving")
    store = tmp_path / ".local" / "state" / "anarchon" / "anarchon.db"
    assert re.search(
        r"INFO +serving version=\S+ instance_id=a:1 namespace=default "
        rf'store="sqlite file {re.escape(str(store))}" listen=127\.0\.0\.1:\d+ http=127\.0\.0\.1:\d+$',
        line,
    )
    assert store.parent.stat().st_mode & 0o777 == 0o700
    sidecar.line_with("ready")
    sidecar.popen.send_signal(signal.SIGTERM)
    assert sidecar.ended() == 0
    assert any("stopped" in line for line in sidecar.lines)
    assert not any("WARNING" in line for line in sidecar.lines), "a stop is no reason to worry"


def test_readiness_is_said_once_and_probes_show_it(serve: Serve) -> None:
    sidecar = serve("--store", "memory:", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    line = sidecar.line_with("serving")
    sidecar.line_with("ready")
    http = re.search(r"http=127\.0\.0\.1:(\d+)", line)
    assert http is not None
    with socket.create_connection(("127.0.0.1", int(http[1])), timeout=WAIT_S) as probe:
        probe.sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
        assert probe.recv(1_000).startswith(b"HTTP/1.1 200")
    sidecar.popen.send_signal(signal.SIGINT)
    assert sidecar.ended() == 0
    assert sum(" ready" in line for line in sidecar.lines) == 1


def test_a_sidecar_without_a_standard_output_serves_and_stops() -> None:
    line = (
        f"exec {sys.executable} -m anarchon_server serve --store memory: --listen 127.0.0.1:0 >&-"
    )
    with subprocess.Popen(["sh", "-c", line], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        for said in process.stderr:
            if " ready" in said:
                break
        assert " ready" in said
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert (process.returncode, "Traceback" in rest) == (0, False)


def test_s23_a_terminal_that_goes_away_is_a_reason_to_stop(serve: Serve) -> None:
    sidecar = serve("--store", "memory:", "--listen", "127.0.0.1:0")
    sidecar.line_with(" ready")
    sidecar.popen.send_signal(signal.SIGHUP)
    assert sidecar.ended() == 0
    assert any(" stopped" in line for line in sidecar.lines)


def test_a_hangup_reads_the_jobs_of_the_file_again(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "anarchon.toml"
    file.write_text("[jobs.sync]\nevery = '10m'\n")
    sidecar = serve("--store", "memory:", "--listen", "127.0.0.1:0", "--config", str(file))
    sidecar.line_with(" ready")
    file.write_text("[jobs.sync]\nevery = '10 parsecs'\n")
    sidecar.popen.send_signal(signal.SIGHUP)
    refused = sidecar.line_with(" reload_refused")
    assert "jobs.sync.every is '10 parsecs'" in refused
    assert f"file={file}" in refused
    file.write_text("[jobs.sync]\nevery = '5m'\n\n[jobs.other]\nevery = '1h'\n")
    sidecar.popen.send_signal(signal.SIGHUP)
    assert "jobs=2" in sidecar.line_with(" reloaded")
    sidecar.popen.send_signal(signal.SIGTERM)
    assert sidecar.ended() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows which signals are ignored")
def test_a_hangup_that_was_ignored_from_the_start_stays_ignored() -> None:
    line = f"trap '' HUP; exec {sys.executable} -m anarchon_server serve --store memory: --listen "
    with subprocess.Popen(
        ["sh", "-c", f"{line} 127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(" ready" in said for said in process.stderr)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert process.returncode == 0
    ignored = re.search(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert ignored is not None
    assert int(ignored[1], 16) & 1 << signal.SIGHUP - 1


def test_signals_that_follow_the_one_to_stop_do_not_change_the_exit_status(serve: Serve) -> None:
    sidecar = serve("--store", "memory:", "--listen", "127.0.0.1:0")
    sidecar.line_with(" ready")
    stop_signals = itertools.cycle((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    while sidecar.popen.poll() is None:
        sidecar.popen.send_signal(next(stop_signals))
        with contextlib.suppress(subprocess.TimeoutExpired):
            sidecar.popen.wait(timeout=0.002)
    assert sidecar.ended() == 0
    assert not any("Traceback" in line for line in sidecar.lines)


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe is set as Linux does")
def test_a_standard_error_that_nobody_reads_holds_up_neither_the_sidecar_nor_its_stop(
    tmp_path: Path,
) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4_096)
    assert os.write(writer, b"x" * 4_096) == 4_096, "it takes no further byte"
    listen = f"unix:{tmp_path}/run/s"
    serve = [sys.executable, "-m", "anarchon_server", "serve", "--store", "memory:"]
    with subprocess.Popen([*serve, "--listen", listen], stderr=writer) as process:
        try:
            with grpc.insecure_channel(listen) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest()
                answers = stub.Watch(request, timeout=WAIT_S, wait_for_ready=True)
                ready = health_pb2.HealthCheckResponse.SERVING
                assert any(answer.status == ready for answer in answers)
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=WAIT_S) == 0
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def test_logs_can_be_json(serve: Serve) -> None:
    sidecar = serve("--store", "memory:", "--listen", "127.0.0.1:0", "--log-format", "json")
    line = json.loads(sidecar.line_with("serving"))
    assert (line["event"], line["store"]) == ("serving", "memory:")


def test_s32_the_environment_and_a_file_set_it_up_as_well(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "anarchon.toml"
    file.write_text('namespace = "shop"\nlisten = "127.0.0.1:0"\n')
    sidecar = serve(ANARCHON_CONFIG=str(file), ANARCHON_STORE="sqlite:rel.db")
    line = sidecar.line_with("serving")
    assert "namespace=shop" in line
    assert (tmp_path / "rel.db").exists()


def test_a_socket_that_no_longer_leads_here_makes_it_not_ready(
    serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "s"
    sidecar = serve("--store", "memory:", "--listen", f"unix:{path}")
    sidecar.line_with(" ready")
    path.unlink()
    line = sidecar.line_with("not_ready")
    assert f"unix:{path} no longer leads to this process" in line


def test_s23_a_client_with_an_open_stream_does_not_hold_up_the_stop(serve: Serve) -> None:
    sidecar = serve("--store", "memory:", "--listen", "127.0.0.1:0")
    address = re.search(r"listen=(\S+)", sidecar.line_with("serving"))
    assert address is not None
    with grpc.insecure_channel(address[1]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        sidecar.popen.send_signal(signal.SIGTERM)
        assert sidecar.ended() == 0
        assert list(watch) == []


# ── Refusals: one line, exit status 2 ───────────────────────────────────────────────────────────


Refusal = Callable[..., str]


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Refusal]:
    """The one line that `anarchon serve` gives, in this process, before it exits with 2."""
    root, ours = logging.getLogger(), logging.getLogger("anarchon")
    before = root.handlers[:], root.level, ours.level
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)

    def refuse(*flags: str, **environ: str) -> str:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert cli.main(["serve", *flags]) == REFUSED
        captured = capfd.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return line

    yield refuse
    root.handlers, level, own_level = before
    root.setLevel(level)
    ours.setLevel(own_level)


def test_a_password_on_the_command_line_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anarchon_server.app.run", lambda _: 0)
    assert cli.main(["serve", "--store", "sqlite:x.db"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["serve", "--store", "redis://u:hunter2@h"]) == 0
    err = capsys.readouterr().err
    assert "give it as ANARCHON_STORE" in err
    assert "hunter2" not in err


def test_what_the_environment_says_of_the_store_is_read_and_taken_out_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, bool]] = []

    def run(read: Config) -> int:
        seen.append((read.store.reveal(), "ANARCHON_STORE" in os.environ))
        return 0

    monkeypatch.setattr("anarchon_server.app.run", run)
    monkeypatch.setenv("ANARCHON_STORE", "redis://u:hunter2@h")
    assert cli.main(["serve"]) == 0
    assert seen == [("redis://u:hunter2@h", False)]


def test_a_refusal_is_one_line_and_exit_status_2_also_of_the_process(serve: Serve) -> None:
    sidecar = serve(ANARCHON_STORE="mongo://u:hunter2@h/db")
    assert sidecar.ended() == REFUSED
    (line,) = sidecar.lines
    assert line.startswith("anarchon serve: no backend serves store URLs that begin with 'mongo'")
    assert "hunter2" not in line


def test_a_refusal_is_an_event_where_logs_are_json(refusal: Refusal, tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/none/anarchon.db"
    line = json.loads(refusal("--store", store, "--log-format", "json"))
    assert (line["level"], line["event"]) == ("error", "refused")
    assert str(tmp_path / "none") in line["error"]


def test_an_unknown_store_is_refused(refusal: Refusal) -> None:
    line = refusal(ANARCHON_STORE="mongo://u:hunter2@h/db")
    assert "known ones: " in line
    assert "sqlite:" in line
    assert "hunter2" not in line


def test_a_store_that_cannot_be_opened_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    line = refusal("--store", f"sqlite://{tmp_path}/none/anarchon.db")
    assert str(tmp_path / "none") in line


def test_strict_refuses_a_store_that_leaves_doubts_and_lists_them_with_their_fixes(
    serve: Serve, refusal: Refusal, tmp_path: Path
) -> None:
    file = tmp_path / "a.db"
    file.touch(mode=0o644)
    file.chmod(0o644)
    flags = ("--store", f"sqlite://{file}", "--listen", "127.0.0.1:0")
    doubt = "others on this machine may use the file (mode 0644)"
    line = refusal(*flags, ANARCHON_STRICT="true")
    assert f"strict is set, and sqlite file {file} leaves " in line
    assert f") {doubt}: chmod 600 {file}" in line
    lax = serve(*flags)  # which tells of what holds and of the doubt, and starts
    assert "SQLite" in lax.line_with("store_verified")
    line = lax.line_with(doubt)
    assert "store_doubt" in line
    assert f'kind=warning fix="chmod 600 {file}"' in line
    lax.line_with(" ready")


def test_a_directory_that_cannot_be_made_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refusal(XDG_STATE_HOME=str(tmp_path / "file"))
    assert "cannot be created: Not a directory: choose another store with --store" in line


def test_a_port_in_use_is_refused(refusal: Refusal) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refusal("--store", "memory:", "--listen", address)
        assert f"{address} is in use by another process" in line
        probes = ("--store", "memory:", "--listen", "127.0.0.1:0", "--http", address)
        assert refusal(*probes) == (
            f"anarchon serve: cannot serve probes on {address}: Address already in use: "
            "choose another address with --http"
        )


def test_a_bad_setting_is_refused_with_what_would_be_right(refusal: Refusal) -> None:
    line = refusal("--lease", "2s")
    assert line == "anarchon serve: lease is '2s': 3s to 1h (flag --lease)"


def test_other_machines_are_not_served_without_tls_and_a_token(refusal: Refusal) -> None:
    assert "set tls_certificate and tls_key and token_file" in refusal("--listen", "0.0.0.0:0")


def test_a_token_file_that_is_missing_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    file = str(tmp_path / "none")
    line = refusal("--store", "memory:", "--listen", "127.0.0.1:0", "--token-file", file)
    assert "none: No such file or directory" in line


def test_a_bad_failpoint_is_refused(refusal: Refusal) -> None:
    flags = ("--store", "memory:", "--listen", "127.0.0.1:0")
    assert "NAME=ACTION" in refusal(*flags, ANARCHON_FAILPOINTS="x")


# ── Failpoints ──────────────────────────────────────────────────────────────────────────────────


def test_a_process_dies_at_the_failpoint_that_a_test_armed(serve: Serve) -> None:
    flags = ("--store", "memory:", "--listen", "127.0.0.1:0")
    sidecar = serve(*flags, ANARCHON_FAILPOINTS="store.beat.before=kill")
    assert sidecar.ended() == -signal.SIGKILL
    assert "failpoints_armed" in sidecar.lines[0]

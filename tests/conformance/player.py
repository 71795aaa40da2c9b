"""Plays a scenario: one step after the other, each with the time it may take."""

from __future__ import annotations

import asyncio
import atexit
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from anarchon._duration import to_timedelta
from anarchon.v1 import session_pb2
from tests.conformance.matching import Bound, differences, made
from tests.conformance.puppet import INTERVAL, TTL, Ending, Puppet
from tests.conformance.registry import Language
from tests.conformance.scenario import Scenario, ScenarioError
from tests.conformance.testee_process import TO_BE_EXPECTED, Line, Testee
from tests.servers.tools import openssl

STEP_S = 30.0
Step = dict[str, Any]


class Player:
    """What both kinds of scenario have: a testee, its lines, and its end."""

    def __init__(self, scenario: Scenario, language: Language, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.changed = asyncio.Event()
        self.bound: Bound = {}
        self.step_s = STEP_S
        self.env: dict[str, str] = {}
        """Of the testee, besides what every one has."""
        self.at = "before the first step"
        self._language = language
        self.testee = Testee(language, folder / "testee.log", self.changed)
        self._seen: list[Line] = []
        self._heard: list[Line] = []
        """Lines that a step has asked for."""

    async def play(self) -> None:
        """From the first step to the last. Raises `ScenarioError` with all there is to see."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.destroy)
            try:
                await self.set_up()
                for number, step in enumerate(self.scenario.steps, 1):
                    self.at = f"step {number}: {json.dumps(step, ensure_ascii=False)[:300]}"
                    await self.take(step)
                self.at = "after the last step"
                self.check_the_rest()
            except ScenarioError as error:
                raise ScenarioError(f"{self.at}\n{error}\n{self.report()}") from None

    async def set_up(self) -> None:
        raise NotImplementedError

    async def destroy(self) -> None:
        await self.testee.destroy()

    async def take(self, step: Step) -> None:
        """Do one step."""
        match step:
            case {"told": what}:
                for _ in range(step.get("times", 1)):
                    await self._told(what, step.get("with", {}))
            case {"may_tell": what}:
                self._heard += [
                    line
                    for line in self.testee.lines
                    if line["what"] == what and not self.compare(step.get("with", {}), line)
                ]
            case {"say": line}:
                self.testee.say(line)
            case {"signal": name}:
                self.testee.signal(name)
            case {"pause": length}:
                await asyncio.sleep(to_timedelta(length).total_seconds())
            case {"exit": status}:
                await self.until(lambda: self.testee.status is not None, "it to end")
                if self.testee.status != status:
                    raise ScenarioError(f"it ended with status {self.testee.status}, not {status}")
            case _:
                raise AssertionError(f"no such step here: {step}")

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition` holds; it is looked at whenever something has come."""
        try:
            async with asyncio.timeout(self.step_s):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise ScenarioError(f"waited {self.step_s:.0f} s for {what}") from None

    async def _told(self, what: str, wanted: Mapping[str, Any]) -> None:
        near: list[str] = []

        def found() -> bool:
            near.clear()
            for line in self.testee.lines:
                if line["what"] != what or any(line is heard for heard in self._heard):
                    continue
                said = self.compare(wanted, line)
                if not said:
                    self._heard.append(line)
                    return True
                near.extend(said)
            if self.testee.status is not None:
                raise ScenarioError(f"it ended, and has not printed {what} {dict(wanted)}; {near}")
            return False

        try:
            await self.until(found, f"{what} {dict(wanted)}")
        except ScenarioError as error:
            raise ScenarioError(f"{error}; {'; '.join(near)}") from None

    def compare(self, wanted: Any, found: Any) -> list[str]:
        """What differs; names are bound only where nothing does."""
        trial = dict(self.bound)
        said = differences(wanted, found, trial)
        if not said:
            self.bound.update(trial)
        return said

    def check_the_rest(self) -> None:
        """What no step has asked for, and what may never be."""
        rest = [
            line
            for line in self.testee.lines
            if line["what"] in TO_BE_EXPECTED and not any(line is heard for heard in self._heard)
        ]
        rest += [line for line in self.testee.lines if line["what"] == "no JSON"]
        if rest:
            raise ScenarioError(f"it printed what it should not have: {rest}")
        tokens = {line["token"] for line in self.testee.lines if "token" in line}
        log = self.testee.log.read_text("utf-8", "replace")
        logged = [
            token for token in tokens if re.search(rf"(?<![\w-]){re.escape(token)}(?![\w-])", log)
        ]
        if logged:
            raise ScenarioError(f"tokens are authority, and its log has {logged}")

    def report(self) -> str:
        """What there is to see when something went wrong."""
        lines = [f"  printed  {json.dumps(line)[:300]}" for line in self.testee.lines[-30:]]
        logs = sorted(self.folder.glob("*.log"))
        for log in logs:
            lines.append(f"--- {log.name}")
            lines += log.read_text("utf-8", "replace").splitlines()[-30:]
        return "\n".join(lines)


class PuppetPlayer(Player):
    """With the puppet as the sidecar."""

    def __init__(self, scenario: Scenario, language: Language, folder: Path) -> None:
        super().__init__(scenario, language, folder)
        # A Unix socket's path is short, and what is above it belongs to us alone.
        self._sockets = Path(mkdtemp(prefix="anarchon-"))
        self._token_file = folder / "token"
        tls = certificate() if scenario.listen == "tls" else None
        is_unix = scenario.listen.startswith("unix")
        if scenario.listen == "unix-open":
            self._sockets.chmod(0o777)
        address = f"unix:{self._sockets / 's'}" if is_unix else "127.0.0.1:0"
        self.puppet = Puppet(address, self.changed, self.bound, token=scenario.token, tls=tls)
        self._slots = 1_791_633_610_000
        self._tls = tls

    async def set_up(self) -> None:
        await self.puppet.start()
        if self.scenario.away:
            await self.puppet.stop()
        env = {**self.env, "ANARCHON_ADDRESS": self.puppet.address}
        config = dict(self.scenario.testee)
        token = config.pop("token", self.scenario.token)
        if token:
            self._token_file.write_text(f"{token}\n")
            env["ANARCHON_TOKEN_FILE"] = str(self._token_file)
        if self._tls is not None:
            config["ca_file"] = str(self._tls[0])
        await self.testee.start(config, {**env, **self.scenario.env})
        self.bound.update(_identity(self.testee.pid))

    async def destroy(self) -> None:
        await super().destroy()
        await self.puppet.stop()
        shutil.rmtree(self._sockets)

    async def take(self, step: Step) -> None:
        """Do one step: what the client calls, what the puppet does, else what both kinds have."""
        if not (
            self._take_event(step) or await self._take_call(step) or await self._take_act(step)
        ):
            await super().take(step)
        if self.puppet.faults:
            raise ScenarioError("; ".join(self.puppet.faults))

    async def _take_call(self, step: Step) -> bool:
        match step:
            case {"expect": method}:
                await self._expect(method, step)
            case {"until": method}:
                await self._until_call(method, step)
            case {"next": method}:
                self._drop(method)
                await self._until_call(method, step)
            case {"count": method}:
                await self._count(method, step)
            case {"result": token}:
                await self._result(token, step.get("is", {}))
            case {"next_result": token}:
                self._drop_results([token])
                await self._result(token, step.get("is", {}))
            case {"drop_results": tokens}:
                self._drop_results(tokens)
            case {"results": count}:
                for number in range(1, count + 1):
                    await self._result(f"{step['prefix']}{number}", step.get("is", {}))
            case _:
                return False
        return True

    def _take_event(self, step: Step) -> bool:
        match step:
            case {"attach": values}:
                standing = {"instance_id": "puppet:1", "server_version": "0", "session_ttl": TTL}
                self._send(attached={**standing, "keep_alive_interval": INTERVAL, **values})
            case {"assign": assignments}:
                self._send(runs={"assignments": [self._assignment(**each) for each in assignments]})
            case {"batch": count}:
                payload = step.get("payload", "x" * step.get("payload_bytes", 0))
                batch = [
                    self._assignment(f"{step['prefix']}{n}", step["job"], payload=payload)
                    for n in range(1, count + 1)
                ]
                self._send(runs={"assignments": batch})
            case {"cancel": values}:
                self._send(cancel=values)
            case {"drain": values}:
                self._send(drain=values)
            case {"send": values}:
                self._send(**values)
            case _:
                return False
        return True

    async def _take_act(self, step: Step) -> bool:
        match step:
            case {"end": values}:
                self.puppet.end(Ending(**values))
            case {"keep_alives": values}:
                self.puppet.answer(keep_alive=values)
            case {"answer": values}:
                self.puppet.answer_held(values)
            case {"receipts": values}:
                self.puppet.answer(complete=values)
            case {"refuse": values}:
                self.puppet.refusal = Ending(**values) if values else None
            case {"accepts": token}:
                self.puppet.token = token
            case {"token": token}:  # the client's file is changed, too
                self.puppet.token = token
                self._token_file.write_text(f"{token}\n")
            case {"away": True}:
                await self.puppet.stop()
            case {"back": True}:
                await self.puppet.start()
            case _:
                return False
        return True

    # ── Calls ───────────────────────────────────────────────────────────────────────────────────

    async def _expect(self, method: str, step: Step) -> None:
        """The next call of this method, whatever other methods are called meanwhile."""
        await self._some_call(method)
        call = self._take_first(method)
        said = self.compare(step.get("with", {}), call.request)
        said += self.compare(step.get("metadata", {}), call.metadata)
        if said:
            raise ScenarioError("; ".join(said))

    async def _until_call(self, method: str, step: Step) -> None:
        """A call of this method that is as wanted; others before it are let go."""
        last: list[str] = []

        def found() -> bool:
            while any(call.method == method for call in self.puppet.calls):
                call = self._take_first(method)
                last[:] = self.compare(step.get("with", {}), call.request)
                last.extend(self.compare(step.get("metadata", {}), call.metadata))
                if not last:
                    return True
            self._check_alive(method)
            return False

        try:
            await self.until(found, f"{method} {step.get('with', {})}")
        except ScenarioError as error:
            raise ScenarioError(f"{error}; of the last: {'; '.join(last)}") from None

    async def _some_call(self, method: str) -> None:
        def found() -> bool:
            if any(call.method == method for call in self.puppet.calls):
                return True
            self._check_alive(method)
            return False

        await self.until(found, method)

    def _check_alive(self, waited_for: str) -> None:
        if self.testee.status is not None:
            raise ScenarioError(f"it ended with status {self.testee.status} before {waited_for}")
        if self.puppet.faults:
            raise ScenarioError("; ".join(self.puppet.faults))

    def _take_first(self, method: str) -> Any:
        call = next(call for call in self.puppet.calls if call.method == method)
        self.puppet.calls.remove(call)
        return call

    def _drop(self, method: str) -> None:
        self.puppet.calls[:] = [call for call in self.puppet.calls if call.method != method]

    async def _count(self, method: str, step: Step) -> None:
        """So many calls in so long a time; in more of it where the machine is slow."""
        loop = asyncio.get_running_loop()
        self._drop(method)
        start, wanted_s = loop.time(), to_timedelta(step["during"]).total_seconds()
        await asyncio.sleep(wanted_s)
        count = sum(call.method == method for call in self.puppet.calls)
        took_s = loop.time() - start
        at_most = step.get("at_most", count) * took_s / wanted_s
        if not step.get("at_least", 0) <= count <= at_most:
            raise ScenarioError(f"{count} calls of {method} in {took_s:.2f} s")
        self._drop(method)

    async def _result(self, token: str, wanted: Mapping[str, Any]) -> None:
        """The first result of this token that no step has taken yet."""

        def found() -> bool:
            if any(result.token == token for result in self.puppet.results):
                return True
            self._check_alive(f"the result of {token}")
            return False

        await self.until(found, f"the result of {token}")
        result = next(each for each in self.puppet.results if each.token == token)
        self.puppet.results.remove(result)
        if said := self.compare(wanted, result.outcome):
            raise ScenarioError(f"the result of {token}: {'; '.join(said)}")

    def _drop_results(self, tokens: list[str]) -> None:
        """What was sent again while its receipt was under way, or refused."""
        results = self.puppet.results
        results[:] = [result for result in results if result.token not in tokens]

    # ── Events ──────────────────────────────────────────────────────────────────────────────────

    def _send(self, **event: Any) -> None:
        message = made(session_pb2.SubscribeResponse, event, self.bound)
        assert isinstance(message, session_pb2.SubscribeResponse)
        self.puppet.send(message)

    def _assignment(self, token: str, job: str, **values: Any) -> dict[str, Any]:
        """An assignment, with what every one has."""
        self._slots += 1_000
        slot = values.get("slot", self._slots)
        if times := values.pop("payload_times", 0):
            values["payload"] *= times
        return {
            "token": token,
            "job": job,
            "slot": slot,
            "attempt": 1,
            "fence": slot * 1_000,
            "trigger": "SCHEDULE",
            "cause": "CLAIM",
            "instance_id": "puppet:1",
            "lease_end_time": slot + 30_000,
            **values,
        }

    def check_the_rest(self) -> None:
        """As for all, and calls and results that no step has asked for."""
        super().check_the_rest()
        rest = [call for call in self.puppet.calls if call.method != "KeepAlive"]
        rest = [call for call in rest if call.method != "Complete"]
        if rest or self.puppet.results:
            raise ScenarioError(f"it sent what it should not have: {rest} {self.puppet.results}")

    def report(self) -> str:
        """The calls that no step has asked for, too."""
        calls = [
            f"  not asked for  {call.method} {' '.join(str(call.request).split())[:300]}"
            for call in self.puppet.calls[-10:]
        ]
        return "\n".join([*calls, super().report()])


def _identity(pid: int) -> Bound:
    """What a client is to say of its process, for scenarios to name; zeros where there is no /proc."""
    proc = Path(f"/proc/{pid}")
    if not proc.exists():
        return {"$pid": pid, "$ticks": 0, "$namespace": 0}
    fields = (proc / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    namespace = (proc / "ns" / "pid").stat().st_ino
    return {"$pid": pid, "$ticks": int(fields[22 - 3]), "$namespace": namespace}


@cache
def certificate() -> tuple[Path, Path]:
    """A certificate and its key for the loopback, made once a session."""
    folder = Path(mkdtemp(prefix="anarchon-tls-"))
    atexit.register(shutil.rmtree, folder)
    file, key = folder / "certificate.pem", folder / "key.pem"
    command = [openssl(), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", str(key)]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return file, key

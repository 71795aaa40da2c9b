"""Plays a scenario with a real sidecar on a real store, a SQLite file, instead of the puppet."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from anarchon import NotFoundError, SidecarUnavailableError
from anarchon.admin import AdminClient
from tests.conformance.player import STEP_S, Player, Step
from tests.conformance.registry import Language
from tests.conformance.scenario import Scenario, ScenarioError
from tests.conformance.testee_process import Testee
from tests.integration.harness import Process
from tests.servers.ports import free_port

ASK_AGAIN_S = 0.1
INSTANCE = "live:1"
_T = TypeVar("_T")


class LivePlayer(Player):
    """The sidecar is started, killed and started again at one address."""

    def __init__(self, scenario: Scenario, language: Language, folder: Path) -> None:
        super().__init__(scenario, language, folder)
        self._address = f"127.0.0.1:{free_port()}"
        self._sidecar = Process(folder / "sidecar.log")
        self._stack = AsyncExitStack()
        self._env = {"ANARCHON_ADDRESS": self._address}
        self._config = folder / "anarchon.toml"
        # What a run is called in the scenario -> its job, to be asked for.
        self._jobs: dict[str, str] = {}

    async def set_up(self) -> None:
        self._config.write_text(self._settings(), "utf-8")
        if self.scenario.token:
            self._env["ANARCHON_TOKEN_FILE"] = self._token("client-token", self._clients_token)
            self._token("token", self.scenario.token)
        await self._start_sidecar()
        await self._start_testee()

    def _settings(self) -> str:
        """The sidecar's. No slot of a job is due while it is tested: runs are triggered."""
        jobs = [f'[jobs."{name}"]\nevery = "366d"\n' for name in self.scenario.testee["jobs"]]
        jobs = [job for job in jobs if job.splitlines()[0] not in self.scenario.config]
        token = f"token_file = {json.dumps(str(self.folder / 'token'))}\n"
        return "".join([token * bool(self.scenario.token), self.scenario.config, "\n", *jobs])

    @property
    def _clients_token(self) -> str:
        return str(self.scenario.testee.get("token", self.scenario.token))

    def _token(self, name: str, token: str) -> str:
        file = self.folder / name
        file.write_text(f"{token}\n", "ascii")
        file.chmod(0o600)
        return str(file)

    async def _start_sidecar(self) -> None:
        await self._sidecar.spawn(
            *("-m", "anarchon_server", "serve", "--listen", self._address),
            *("--instance-id", INSTANCE, "--config", str(self._config)),
            env={"ANARCHON_STORE": f"sqlite://{self.folder / 'store.db'}"},
        )

    async def _start_testee(self) -> None:
        config = {key: value for key, value in self.scenario.testee.items() if key != "token"}
        await self.testee.start(config, self._env)

    async def destroy(self) -> None:
        await super().destroy()
        await self._stack.aclose()
        await self._sidecar.destroy()

    # ── Steps ───────────────────────────────────────────────────────────────────────────────────

    async def take(self, step: Step) -> None:
        """Do one step: what is done to the sidecar, asked of it, or what both kinds have."""
        match step:
            case {"sidecar": "start"}:
                await self._start_sidecar()
            case {"sidecar": "kill"}:
                self._sidecar.signal(signal.SIGKILL)
                await self._sidecar.ended()
            case {"sidecar": "stop"}:
                self._sidecar.signal(signal.SIGTERM)
            case {"sidecar": "ended"}:
                if status := await self._sidecar.ended():
                    raise ScenarioError(f"the sidecar ended with status {status}")
            case {"testee": "start"}:
                await self._another_testee()
            case {"trigger": job}:
                await self._trigger(job, step["as"], step.get("payload", ""))
            case {"cancel_run": name}:
                job, slot = self._jobs[name], self.bound[name]
                await self._asked(lambda admin: admin.cancel_run(job, slot))
            case {"run": name}:
                await self._run_is(name, step.get("is", {}))
            case {"job": name}:
                found = await self._asked(lambda admin: admin.get_job(name))
                if said := self.compare(step.get("is", {}), found):
                    raise ScenarioError("; ".join(said))
            case _:
                await super().take(step)

    async def _another_testee(self) -> None:
        """In place of the one before, which has ended; its lines stay, and have been asked for."""
        await self.until(lambda: self.testee.status is not None, "the testee to end")
        self.check_the_rest()
        log = self.folder / "testee-again.log"
        self.testee = Testee(self._language, log, self.changed)
        self._stack.push_async_callback(self.testee.destroy)
        await self._start_testee()

    async def _trigger(self, job: str, name: str, payload: str) -> None:
        request_id = str(uuid4())
        run = await self._asked(
            lambda admin: admin.trigger_run(job, payload=payload.encode(), request_id=request_id)
        )
        self._jobs[name], self.bound[name] = job, run.slot

    async def _run_is(self, name: str, wanted: Mapping[str, Any]) -> None:
        """Wait for the history to be so: nobody here is told when it changes."""
        job, slot = self._jobs[name], self.bound[name]
        said: list[str] = ["not asked yet"]
        try:
            async with asyncio.timeout(STEP_S):
                while said:
                    run = await self._asked(lambda admin: admin.get_run(job, slot))
                    said = self.compare(wanted, run)
                    if said:
                        await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise ScenarioError(f"the run of {job} stays as it is: {'; '.join(said)}") from None

    async def _asked(self, ask: Callable[[AdminClient], _T]) -> _T:
        """What the sidecar answers, once it is there."""
        token = self.folder / "token" if self.scenario.token else None

        def call() -> _T:
            with AdminClient(self._address, token_file=token) as admin:
                return ask(admin)

        try:
            async with asyncio.timeout(STEP_S):
                while True:
                    try:
                        return await asyncio.to_thread(call)
                    except (SidecarUnavailableError, NotFoundError):
                        await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise ScenarioError("the sidecar does not answer") from None

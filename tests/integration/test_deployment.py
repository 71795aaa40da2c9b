"""What the images start, as the compose file and the manifest start it, in plain processes.

No container engine: the paths are a test's own, the commands and variables those of `deploy/`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
import yaml

from tests.servers.ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
ANARCHON = str(Path(sys.executable).with_name("anarchon"))
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts a process that cannot outlive the test."""
    children: list[subprocess.Popen[str]] = []

    def start(*command: str, env: dict[str, str]) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        with child:
            pass  # waits for its end, and closes its pipe


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="anarchon-") as folder:
        yield Path(folder)


def line_of(stream: IO[str] | None, word: str) -> str:
    """The first line with `word`; the test's time limit bounds the wait."""
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        if word in line:
            return line
    raise AssertionError(f"it ended without saying {word!r}:\n{''.join(seen)}")


def health(env: dict[str, str]) -> int:
    return subprocess.run(
        [ANARCHON, "health"], env=env, check=False, capture_output=True
    ).returncode


def compose_environments(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Of instance a: its sidecar's and its application's, with the volumes put into `folder`."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]

    def environment(name: str) -> dict[str, str]:
        found: dict[str, str] = services[name]["environment"]
        return {key: value.replace("/run/anarchon", str(folder)) for key, value in found.items()}

    store = {"ANARCHON_STORE": f"sqlite://{folder}/anarchon.db"}
    return environment("sidecar-a") | store, environment("app-a")


def manifest_environments(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The sidecar's and the application's, on free ports, with the volume put into `folder`."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "anarchon-example.yaml").read_text())
    pod = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]
    address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    moved = {
        "127.0.0.1:7420": address,
        "0.0.0.0:7421": http,
        "sqlite:///var/lib/anarchon/anarchon.db": f"sqlite://{folder}/anarchon.db",
    }

    def environment(container: dict[str, list[dict[str, str]]]) -> dict[str, str]:
        values = {item["name"]: item.get("value", "pod-1") for item in container["env"]}
        return {name: moved.get(value, value) for name, value in values.items()}

    # What `kubectl exec` and the probes ask is the default address; a test cannot have that.
    sidecar = environment(pod["initContainers"][0]) | {"ANARCHON_ADDRESS": address}
    return sidecar, environment(pod["containers"][0])


@pytest.mark.parametrize("environments", [compose_environments, manifest_environments])
def test_s23_the_deployed_pair_starts_is_healthy_and_stops_politely(
    environments: Callable[[Path], tuple[dict[str, str], dict[str, str]]],
    spawn: Spawn,
    short: Path,
) -> None:
    for_sidecar, for_app = environments(short)
    app = spawn(sys.executable, str(DEPLOY / "example" / "app.py"), env=for_app)
    line_of(app.stdout, "no sidecar answers")
    assert health(for_sidecar) != 0

    sidecar = spawn(ANARCHON, "serve", env=for_sidecar)
    line_of(app.stdout, f"attached to instance {for_sidecar['ANARCHON_INSTANCE_ID']}")
    line_of(sidecar.stdout, "ready")
    assert health(for_sidecar) == 0

    app.send_signal(signal.SIGTERM)
    app.communicate()
    sidecar.send_signal(signal.SIGTERM)
    told, _ = sidecar.communicate()
    assert "session_closed" in told, "the application left without a word"
    assert (app.returncode, sidecar.returncode) == (0, 0)

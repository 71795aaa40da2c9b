"""The deployment files are valid by their formats' own schemas, and keep what they promise.

There is no container engine in these tests: `deploy/README.md` says what that leaves out.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from anarchon_server.config import load
from anarchon_server.core import limits

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
USER = 10001
STOP_SECONDS = (limits.STOP_GRACE + limits.CANCEL_GRACE) / 1000

# Native sidecars are on by default from the first of these on.
KUBERNETES_VERSIONS = ["1.29", "1.31", "1.33", "1.34"]

Document = dict[str, Any]

# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def manifest() -> list[Document]:
    text = (DEPLOY / "kubernetes" / "anarchon-example.yaml").read_text()
    return list(yaml.safe_load_all(text))


@pytest.fixture(scope="module")
def pod(manifest: list[Document]) -> Document:
    deployment = next(document for document in manifest if document["kind"] == "Deployment")
    spec: Document = deployment["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def sidecar(pod: Document) -> Document:
    (container,) = pod["initContainers"]
    return dict(container)


def environment(container: Document) -> dict[str, str]:
    """A container's variables; a made-up name stands for one that the cluster fills in."""
    return {item["name"]: item.get("value", "filled-in") for item in container["env"]}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_manifest_is_valid_by_the_kubernetes_schemas(
    manifest: list[Document], version: str
) -> None:
    assert [document["kind"] for document in manifest] == ["PersistentVolumeClaim", "Deployment"]
    for document in manifest:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_see_a_misspelled_field(manifest: list[Document]) -> None:
    wrong = copy.deepcopy(manifest[1])
    (container,) = wrong["spec"]["template"]["spec"]["initContainers"]
    container["restartpolicy"] = container.pop("restartPolicy")
    with pytest.raises(kubernetes_validate.ValidationError, match="restartpolicy"):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def test_the_selector_finds_the_pods(manifest: list[Document]) -> None:
    deployment = manifest[1]["spec"]
    wanted = deployment["selector"]["matchLabels"].items()
    assert wanted <= deployment["template"]["metadata"]["labels"].items()


def test_the_sidecar_is_native_and_probed_by_its_own_command(sidecar: Document) -> None:
    assert sidecar["restartPolicy"] == "Always"
    for probe in ("startupProbe", "readinessProbe"):
        assert sidecar[probe]["exec"]["command"] == ["anarchon", "health"]


def test_a_store_that_is_away_restarts_nothing(sidecar: Document) -> None:
    """`/livez` is about the process alone; a restart would lose the results that wait."""
    (port,) = sidecar["ports"]
    assert sidecar["livenessProbe"]["httpGet"] == {"path": "/livez", "port": port["name"]}
    assert environment(sidecar)["ANARCHON_HTTP"] == f"0.0.0.0:{port['containerPort']}"


def test_both_graces_fit_into_the_pods(pod: Document) -> None:
    application = limits.STOP_GRACE / 1000
    assert pod["terminationGracePeriodSeconds"] >= application + STOP_SECONDS + 5


def test_nothing_in_the_pod_runs_as_root_or_writes_into_its_image(pod: Document) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == USER
    for container in pod["initContainers"] + pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]


def test_pods_that_share_sqlite_are_kept_on_one_node(pod: Document, sidecar: Document) -> None:
    assert environment(sidecar)["ANARCHON_STORE"].startswith("sqlite:")
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    (term,) = pod["affinity"]["podAffinity"][required]
    assert term["topologyKey"] == "kubernetes.io/hostname"


def test_the_sidecar_listens_where_the_application_asks(pod: Document, sidecar: Document) -> None:
    (app,) = pod["containers"]
    listen = environment(sidecar)["ANARCHON_LISTEN"]
    address = environment(app)["ANARCHON_ADDRESS"]
    assert listen == address
    assert listen.startswith("127.0.0.1:"), "only loopback needs no credentials"


def test_every_volume_is_mounted_and_every_mount_has_its_volume(pod: Document) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    containers = pod["initContainers"] + pod["containers"]
    assert volumes == {mount["name"] for c in containers for mount in c["volumeMounts"]}


def test_the_sidecar_understands_what_the_manifest_sets(sidecar: Document) -> None:
    config = load({}, environment(sidecar))
    assert config.stop_grace.total_seconds() == limits.STOP_GRACE / 1000


# ── Compose ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def compose() -> Document:
    document: Document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return document


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    """Checks a file by the Compose Specification's schema, which the tool carries with it."""
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


def test_the_compose_file_is_valid_by_the_compose_schema() -> None:
    result = check_compose(DEPLOY / "compose.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_compose_schema_sees_a_misspelled_field(compose: Document, tmp_path: Path) -> None:
    wrong = copy.deepcopy(compose)
    wrong["services"]["sidecar-a"]["stop_grace"] = "40s"
    (tmp_path / "compose.json").write_text(json.dumps(wrong))
    result = check_compose(tmp_path / "compose.json")
    assert result.returncode == 1
    assert "stop_grace" in result.stdout


def test_three_instances_share_one_store_and_nothing_else(compose: Document) -> None:
    services = compose["services"]
    instances = ["a", "b", "c"]
    assert sorted(services) == sorted(
        f"{kind}-{i}" for kind in ("app", "sidecar") for i in instances
    )
    for i in instances:
        own_socket = f"socket-{i}:/run/anarchon"
        sidecar, app = services[f"sidecar-{i}"], services[f"app-{i}"]
        assert sidecar["volumes"] == ["store:/var/lib/anarchon", own_socket]
        assert app["volumes"] == [own_socket]
        assert sidecar["environment"]["ANARCHON_INSTANCE_ID"] == i
        assert sidecar["environment"]["ANARCHON_LISTEN"] == app["environment"]["ANARCHON_ADDRESS"]
        assert sidecar["environment"]["ANARCHON_ADDRESS"] == app["environment"]["ANARCHON_ADDRESS"]
    assert set(compose["volumes"]) == {"store", *(f"socket-{i}" for i in instances)}


def test_the_sidecars_understand_what_compose_and_the_image_set(compose: Document) -> None:
    image = [arguments for name, arguments in stages()["sidecar"] if name == "ENV"]
    ours = dict(re.findall(r"(ANARCHON_\w+)=(\S+)", " ".join(image)))
    assert ours
    for name, service in compose["services"].items():
        if name.startswith("sidecar"):
            config = load({}, ours | service["environment"])
            assert str(config.listen) == service["environment"]["ANARCHON_LISTEN"]


def test_compose_gives_each_sidecar_time_to_stop_politely(compose: Document) -> None:
    for name, service in compose["services"].items():
        needed = STOP_SECONDS if name.startswith("sidecar") else limits.STOP_GRACE / 1000
        assert float(service["stop_grace_period"].removesuffix("s")) > needed + 5


def test_compose_builds_stages_that_the_dockerfile_has(compose: Document) -> None:
    for service in compose["services"].values():
        assert service["build"]["dockerfile"] == "deploy/Dockerfile"
        assert service["build"]["target"] in stages()


# ── Dockerfile ──────────────────────────────────────────────────────────────────────────────────


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, in order, each with its arguments on one line."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, those of the stages it is built on first."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for name, arguments in instructions():
        if name == "FROM":
            base, _, stage = arguments.split()
            current = found[stage] = list(found.get(base, []))
        elif name != "ARG" or found:
            current.append((name, arguments))
    return found


def test_a_build_without_a_target_makes_the_sidecar() -> None:
    assert list(stages())[-1] == "sidecar"


@pytest.mark.parametrize("stage", ["sidecar", "example"])
def test_the_images_run_as_a_user_without_rights(stage: str) -> None:
    users = [arguments for name, arguments in stages()[stage] if name == "USER"]
    assert users[-1] == f"{USER}:{USER}"


def test_the_sidecars_image_checks_its_own_health() -> None:
    sidecar = dict(stages()["sidecar"])
    assert sidecar["HEALTHCHECK"].endswith('CMD ["anarchon", "health"]')
    assert sidecar["ENTRYPOINT"] == '["anarchon"]'
    assert sidecar["CMD"] == '["serve"]'


def test_the_final_images_hold_no_build_stage_but_the_environment_it_made() -> None:
    for stage in ("sidecar", "example"):
        copied = [arguments for name, arguments in stages()[stage] if name == "COPY"]
        taken = [arguments for arguments in copied if "--from=" in arguments]
        assert taken == [f"--from=build-{stage} /opt/anarchon /opt/anarchon"]


def test_everything_that_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sent = sent_patterns()
    for name, arguments in instructions():
        if name != "COPY" or "--from=" in arguments:
            continue
        for source in arguments.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(f"{source}/", f"{pattern}/*") for pattern in sent), source


def sent_patterns() -> list[str]:
    """What the ignore file lets through, once it has ignored everything."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    return [rule[1:] for rule in rules if rule.startswith("!")]


def test_the_wheel_can_be_built_from_what_is_sent() -> None:
    """hatchling reads these; a build without them fails."""
    project = (ROOT / "pyproject.toml").read_text()
    sent = sent_patterns()
    for needed in ("README.md", "LICENSE", "client/python", "server", "backends"):
        assert needed in project
        assert needed in sent

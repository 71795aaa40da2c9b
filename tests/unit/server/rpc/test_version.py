"""How far apart a client and a sidecar may be."""

from __future__ import annotations

import pytest

from anarchon_server.core.errors import RefusedError
from anarchon_server.rpc.version import check_client


@pytest.mark.parametrize(
    ("client", "server"),
    [
        ("0.1.0", "0.1.0"),
        ("0.2.7", "0.1.0"),
        ("0.1.0", "0.2.0"),
        ("v0.1.0-rc.1", "0.1.0"),
        ("0.1.0.dev3", "0.1.0"),
        ("0.1", "0.1.0"),
        ("1.9.0", "1.0.0"),
        ("1.0.0+build", "1.7.3"),
    ],
)
def test_near_versions_work_together(client: str, server: str) -> None:
    check_client(client, server)


@pytest.mark.parametrize(
    ("client", "server", "right"),
    [
        ("0.3.0", "0.1.0", "use versions 0.0 to 0.2 of both"),
        ("1.0.0", "0.9.0", "use versions 0.8 to 0.10 of both"),
        ("2.0.0", "1.0.0", r"use versions 1\.x of both"),
    ],
)
def test_a_client_too_far_away_is_refused_with_both_versions(
    client: str, server: str, right: str
) -> None:
    with pytest.raises(RefusedError, match=right) as caught:
        check_client(client, server)
    assert caught.value.reason == "VERSION"
    assert client in str(caught.value)
    assert server in str(caught.value)


@pytest.mark.parametrize("client", ["", "latest", "1", "x.y", "0.1.0\nforged", "9" * 400 + ".1"])
def test_a_version_that_cannot_be_read_is_refused(client: str) -> None:
    with pytest.raises(RefusedError, match="send the client library's version") as caught:
        check_client(client, "0.1.0")
    assert "\n" not in str(caught.value)

"""Programs that some tests need beside the stores."""

from __future__ import annotations

import shutil

import pytest


def openssl() -> str:
    """Where `openssl` is, which makes certificates; the test is skipped where there is none."""
    found = shutil.which("openssl")
    if found is None:
        pytest.skip("no toolchain: openssl: it is not on this machine")
    return found

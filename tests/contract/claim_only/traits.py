"""Where backends without leases differ, by the name under which they run."""

from __future__ import annotations

import pytest

from tests.contract.harness import CLAIM_ONLY

NO_WAY_BACK = [name for name in CLAIM_ONLY if name.endswith("stream-id")]
"""A slot older than the newest that was claimed can never be claimed (`OLD`)."""

OWN_HISTORY = [name for name in CLAIM_ONLY if name.startswith("rabbitmq")]
"""What is shown of runs, jobs and instances is the answering instance's own."""

CONTROLLED = [name for name in CLAIM_ONLY if not name.startswith(("nats", "rabbitmq"))]
"""They pause, resume, trigger and cancel (S29)."""

CLAIMS_IN_ANY_ORDER = [name for name in CLAIM_ONLY if name not in NO_WAY_BACK]
SHARED_HISTORY = [name for name in CLAIM_ONLY if name not in OWN_HISTORY]

in_any_order = pytest.mark.parametrize("backend", CLAIMS_IN_ANY_ORDER, indirect=True)
no_way_back = pytest.mark.parametrize("backend", NO_WAY_BACK, indirect=True)
controlled = pytest.mark.parametrize("backend", CONTROLLED, indirect=True)
not_controlled = pytest.mark.parametrize(
    "backend", [name for name in CLAIM_ONLY if name not in CONTROLLED], indirect=True
)
shared_history = pytest.mark.parametrize("backend", SHARED_HISTORY, indirect=True)
own_history = pytest.mark.parametrize("backend", OWN_HISTORY, indirect=True)

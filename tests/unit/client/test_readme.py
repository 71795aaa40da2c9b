"""The specification's example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anarchon._jobs import Job, collect
from anarchon.testing import run_handler

README = Path(__file__).parents[3] / "client" / "README.md"


async def test_the_example_of_the_readme_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, str(README), "exec"), names)
    jobs: dict[str, Job] = collect([names["sync"], names["report"]])
    assert list(jobs) == ["sync", "report"]
    assert await run_handler(names["sync"]) == "3 rows"
    assert await run_handler(names["report"]) is None

"""The jobs of the configuration's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from anarchon_server.config import ConfigError, load, load_jobs
from anarchon_server.core.configured import laid_over
from anarchon_server.core.model import (
    CatchUpPolicy,
    CronSchedule,
    EverySchedule,
    JobSpec,
    OverlapPolicy,
    RetrySpec,
)


def read(tmp_path: Path, text: str) -> dict[str, JobSpec]:
    file = tmp_path / "anarchon.toml"
    file.write_text(text)
    config = load({"config": str(file)}, {"HOME": str(tmp_path)})
    assert config.file == file
    assert dict(load_jobs(file)) == dict(config.jobs)
    return dict(config.jobs)


def test_a_job_has_a_schedule_and_every_policy(tmp_path: Path) -> None:
    jobs = read(
        tmp_path,
        """
        namespace = "billing"

        [jobs.sync]
        every = "10m"
        offset = "30s"
        jitter = "0s"
        timeout = "5m"
        lease = "1m"
        heartbeat = "10s"
        overlap = "queue"
        catch_up = "all"
        catch_up_window = "6h"
        catch_up_limit = 10
        start_deadline = "2m"
        max_attempts = 5
        concurrency = 2
        retries = 3
        retry_delay = "2s"
        retry_factor = 1.5
        retry_max_delay = "1m"
        cancel_grace = "3s"
        stop_grace = "10s"
        labels = { team = "billing", tier = "1" }

        [jobs."nightly/report"]
        cron = "0 3 * * *"
        tz = "Europe/Athens"

        [jobs.only-policies]
        lease = "10s"
        """,
    )
    assert jobs["sync"] == JobSpec(
        "sync",
        EverySchedule(600_000, 30_000),
        jitter_ms=0,
        timeout_ms=300_000,
        heartbeat_ms=10_000,
        lease_ms=60_000,
        overlap=OverlapPolicy.QUEUE,
        catch_up=CatchUpPolicy.ALL,
        catch_up_window_ms=6 * 3_600_000,
        catch_up_limit=10,
        start_deadline_ms=120_000,
        max_attempts=5,
        concurrency=2,
        retry=RetrySpec(3, 2_000, 1.5, 60_000),
        cancel_grace_ms=3_000,
        stop_grace_ms=10_000,
        labels=(("team", "billing"), ("tier", "1")),
    )
    assert jobs["nightly/report"].schedule == CronSchedule("0 3 * * *", "Europe/Athens")
    assert jobs["only-policies"].schedule is None


def test_what_a_client_asks_for_can_be_switched_off(tmp_path: Path) -> None:
    text = """
        [jobs.sync]
        retries = 0
        timeout = "none"
        concurrency = 0
        jitter = "0s"
        overlap = "allow"
        catch_up = "none"
        """
    stated = JobSpec(
        "sync",
        EverySchedule(60_000),
        retry=RetrySpec(3),
        timeout_ms=5_000,
        concurrency=2,
        jitter_ms=1_000,
    )
    spec, _ = laid_over(stated, read(tmp_path, text))
    assert spec == JobSpec(
        "sync",
        EverySchedule(60_000),
        jitter_ms=0,
        overlap=OverlapPolicy.ALLOW,
        catch_up=CatchUpPolicy.NONE,
    )


def test_without_a_table_there_are_no_jobs(tmp_path: Path) -> None:
    assert read(tmp_path, "namespace = 'a'\n") == {}
    assert load({}, {"HOME": str(tmp_path)}).jobs == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jobs = 3", "jobs is 3: write a table for each job: [jobs.NAME]"),
        ("[jobs]\nsync = 3", "jobs.sync is 3: write a table: [jobs.sync]"),
        ("[jobs.'a b']\nevery = '1s'", "jobs.a b is 'a b': use 1 to 128 characters"),
        ("[jobs.a]\nevry = '1s'", "jobs.a.evry is '1s': there is no such key; did you mean every?"),
        ("[jobs.a]\nevery = 10", "jobs.a.every is 10: write a duration as a text"),
        ("[jobs.a]\nevery = '10 parsecs'", "jobs.a.every is '10 parsecs': "),
        ("[jobs.a]\nevery = '1ms'", "jobs.a.every is '1ms': at least 100ms"),
        ("[jobs.a]\nevery = '1s'\ncron = '* * * * *'", "jobs.a.cron is '* * * * *': set every or"),
        ("[jobs.a]\ncron = '0 25 * * *'", "jobs.a.cron is '0 25 * * *': its hour is '25': 25 is"),
        ("[jobs.a]\ncron = '0 3 * * *'\ntz = 'Mars/Base'", "jobs.a.tz is 'Mars/Base': not a zone"),
        ("[jobs.a]\ntz = 'UTC'", "jobs.a.tz is 'UTC': it goes with cron"),
        ("[jobs.a]\noffset = '1s'", "jobs.a.offset is '1s': it goes with every"),
        ("[jobs.a]\noverlap = 'maybe'", "jobs.a.overlap is 'maybe': one of: skip, allow, queue"),
        ("[jobs.a]\ncatch_up = 'some'", "jobs.a.catch_up is 'some': one of: none, latest, all"),
        ("[jobs.a]\nmax_attempts = 0", "jobs.a.max_attempts is 0: write a whole number, 1 to 1000"),
        ("[jobs.a]\nmax_attempts = true", "jobs.a.max_attempts is True: write a whole number"),
        ("[jobs.a]\nretry_delay = '1s'", "jobs.a.retry_delay is '1s': it goes with retries"),
        ("[jobs.a]\nretries = 1\nretry_factor = 'x'", "jobs.a.retry_factor is 'x': write a number"),
        (
            "[jobs.a]\nretries = 1\nretry_factor = 0",
            "jobs.a.retry_factor is 0: write a number, 1 to 100",
        ),
        (
            "[jobs.a]\nretries = 1\nretry_factor = nan",
            "jobs.a.retry_factor is nan: write a number, 1",
        ),
        (
            "[jobs.a]\nretries = 1\nretry_factor = true",
            "jobs.a.retry_factor is True: write a number",
        ),
        ("[jobs.a]\nretries = -1", "jobs.a.retries is -1: write a whole number, 0 to 100"),
        (
            "[jobs.a]\nretries = 0\nretry_delay = '1s'",
            "jobs.a.retry_delay is '1s': there is nothing to space: retries is 0",
        ),
        ("[jobs.a]\ntimeout = '0s'", "jobs.a.timeout is '0s': at least 1ms; \"none\" for no limit"),
        ("[jobs.a]\nconcurrency = -1", "jobs.a.concurrency is -1: write a whole number, 0 to"),
        ("[jobs.a]\nlabels = {}", "jobs.a.labels is {}: write a table of texts"),
        ("[jobs.a]\nlabels = { a = 1 }", "jobs.a.labels is {'a': 1}: write a table of texts"),
        ("[jobs.a]\ncron = ''", "jobs.a.cron is '': write a text"),
    ],
)
def test_what_is_wrong_is_named_with_the_job_the_key_and_the_file(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert str(refused.value).startswith(said)
    assert str(refused.value).endswith(f"({tmp_path}/anarchon.toml)")

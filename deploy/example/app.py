"""An application for the example deployments: three jobs, each slot on one of the instances.

It may import the client, and the standard library. It reads `ANARCHON_ADDRESS`, as every client.
"""

from __future__ import annotations

import hashlib
import logging
import sysconfig
from pathlib import Path

from anarchon import AnarchonClient, Context, cron, every


@every("10s")
async def tick(ctx: Context) -> str:
    """Says that it was this instance's turn."""
    ctx.log.info("slot %s, attempt %d, fence %d", ctx.scheduled_at, ctx.attempt, ctx.fence)
    return "ticked"


@cron("*/30 * * * * *", tz="Europe/Athens")
async def report(ctx: Context) -> str:
    """Keeps a short text with its run, to be seen by `anarchon runs --json`."""
    return f"reported by {ctx.instance_id}"


@every("1m", lease="10s")
def checksum(ctx: Context) -> str:
    """Checksums Python's own library: long enough to be killed in the middle of.

    It runs in a thread, so it asks now and then whether it may go on.
    """
    digest = hashlib.sha256()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        ctx.check()
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    AnarchonClient().run([tick, report, checksum])

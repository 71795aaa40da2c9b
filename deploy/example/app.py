"""An application for the example deployments: three jobs, each slot on one of the instances.

It imports the client and the standard library, and reads `ANARCHON_ADDRESS`, as every client.
"""

from __future__ import annotations

import hashlib
import logging
import sysconfig
from pathlib import Path

from anarchon import AnarchonClient, Context, SyncContext, cron, every


@every("10s")
async def tick(ctx: Context) -> str:
    """Says that it was this instance's turn."""
    ctx.log.info("scheduled at %s, fence %d", ctx.scheduled_at, ctx.fence)
    return "ticked"


@cron("*/30 * * * * *", tz="Europe/Athens")
async def report(ctx: Context) -> str:
    """Keeps a short text with its run, to be seen by `anarchon runs --json`."""
    return f"reported by {ctx.instance_id}"


@every("1m", lease="10s")
def checksum(ctx: SyncContext) -> str:
    """Checksums Python's own library without haste: long enough to be killed in the middle of.

    It runs in a thread: the pause after each file is also where it learns of a cancellation.
    """
    digest = hashlib.sha256()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("*.py")):
        digest.update(path.read_bytes())
        ctx.sleep("100ms")
    return digest.hexdigest()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    AnarchonClient().run([tick, report, checksum])

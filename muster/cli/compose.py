"""Adapter: people: the story of the demo on the containers of compose.yaml.

It is played from one of them, which can signal none of the others: what it breaks is what the
stand-ins break when they are asked.
"""

import asyncio
import contextlib
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from muster.cli import bus_client, demo, demo_steps
from muster.local import layout

_FAULTS: Final = Path("/faults")
_HEARD_SINCE: Final = timedelta(hours=1)


class Containers:
    """Where the programs are."""

    def http(self, name: str) -> str:
        """Return where a container serves HTTP."""
        return f"http://{name}:8080"

    def faults(self, node: str) -> Path:
        """Return the fault script of a node's simulated GPUs."""
        return _FAULTS / f"{node}.jsonl"


async def play(told: demo.Playing) -> None:
    """Play on containers that run already, and go on running."""
    told.say(f"simulated: 3 nodes, their kubelets and {demo_steps.GPUS} GPUs; the rest is real\n")
    here = Containers()
    began = asyncio.get_running_loop().time()
    since = datetime.now(UTC) - _HEARD_SINCE
    pod = f"{here.http('kubernetes')}/api/v1/namespaces/default/pods/{demo_steps.POD}"
    a, b, _ = (node.name for node in layout.NODES)
    heard = bus_client.Watch()
    played = demo_steps.Acts(here, heard)
    async with bus_client.everything(os.environ["NATS_URL"], heard.hear, since=since):
        told.took("connect", began, "to NATS, as admin")
        try:
            await told.play([*played.at_first("a simulated one", a), *played.asked_for(a, b)])
        finally:
            with contextlib.suppress(OSError):
                await demo_steps.delete(f"{pod}?gracePeriodSeconds=0")
    told.complete = True


if __name__ == "__main__":
    sys.exit(demo.tell(play, as_json=False))

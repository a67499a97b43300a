"""Adapter: people: the story of `muster demo` on the containers of compose.yaml.

It is played from one of them, which cannot send a signal to any other: it breaks only what the
stand-ins break on request.
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
_EVENTS_AGE: Final = timedelta(hours=1)


class Containers:
    """Where the programs are."""

    def http(self, name: str) -> str:
        """Return where a container serves HTTP."""
        return f"http://{name}:8080"

    def faults(self, node: str) -> Path:
        """Return the fault script of a node's simulated GPUs."""
        return _FAULTS / f"{node}.jsonl"


async def play(story: demo.Story) -> None:
    """Play on containers that run already, and keep running."""
    story.print(
        f"simulated: 3 nodes, their kubelets and {demo_steps.GPUS} GPUs; the rest is real\n"
    )
    containers = Containers()
    started = asyncio.get_running_loop().time()
    since = datetime.now(UTC) - _EVENTS_AGE
    pod = f"{containers.http('kubernetes')}/api/v1/namespaces/default/pods/{demo_steps.POD}"
    a, b, _ = (node.name for node in layout.NODES)
    recorder = bus_client.Recorder()
    steps = demo_steps.Steps(containers, recorder)
    async with bus_client.subscribe_all(os.environ["NATS_URL"], recorder.record, since=since):
        story.add("connect", started, "to NATS, as admin")
        try:
            await story.play([*steps.healthy("a simulated one", a), *steps.on_request(a, b)])
        finally:
            with contextlib.suppress(OSError):
                await demo_steps.delete(f"{pod}?gracePeriodSeconds=0")
    story.is_complete = True


if __name__ == "__main__":
    sys.exit(demo.run(play, as_json=False))

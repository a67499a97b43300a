"""Door to people: the story of the demo on the containers of compose.yaml.

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

from muster.cli import cluster, demo, watch
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


class Played(demo.Demo):
    """One playing on containers that run already, and go on running."""

    async def play(self) -> None:
        """Play; stop at the first step that fails."""
        self._print(f"simulated: 3 nodes, their kubelets and {demo.GPUS} GPUs; the rest is real\n")
        self._place = Containers()
        began = asyncio.get_running_loop().time()
        since = datetime.now(UTC) - _HEARD_SINCE
        pod = f"{self._place.http('kubernetes')}/api/v1/namespaces/default/pods/{demo.POD}"
        async with watch.everything(os.environ["NATS_URL"], self._watch.hear, since=since):
            self._note("connect", began, "to NATS, as admin")
            try:
                await self._play(self._steps())
            finally:
                with contextlib.suppress(OSError):
                    await cluster.delete(f"{pod}?gracePeriodSeconds=0")
        self.complete = True

    def _steps(self) -> list[tuple[str, demo.Play]]:
        a, b, _ = (node.name for node in layout.NODES)
        return [*self._at_first("a simulated one", a), *self._asked_for(a, b)]


if __name__ == "__main__":
    sys.exit(demo.tell(Played(quiet=False), as_json=False))

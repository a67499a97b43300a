"""Adapter: paths of the host that a container is to be given: whether they are there now."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from muster_plugin import blocking

_TIMEOUT_S: Final = 1.0
_DEV: Final = "/dev/"


class Paths:
    """Asks for paths, wherever they are, without holding up the event loop."""

    def __init__(self) -> None:
        self._lane = blocking.Lane()

    async def missing(self, paths: Sequence[str]) -> list[str]:
        """Return those that are not there. Raises TimeoutError if their mount hangs."""
        gone = [path for path in paths if path.startswith(_DEV) and not os.path.exists(path)]  # noqa: PTH110, ASYNC240  # devtmpfs never hangs; a Path costs more than the answer
        others = [path for path in paths if not path.startswith(_DEV)]
        if others:
            gone += await self._lane.run(lambda: _missing(others), timeout_s=_TIMEOUT_S)
        return gone

    async def present(self, paths: Sequence[str]) -> frozenset[str]:
        """Return those that are there. Raises TimeoutError if their mount hangs."""
        return frozenset(paths).difference(await self.missing(paths)) if paths else frozenset()


def _missing(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not Path(path).exists()]

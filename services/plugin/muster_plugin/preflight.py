"""Adapter: what must be true before the process serves: its name, its place, being alone."""

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from muster import vocabulary
from muster.service import logs
from muster_plugin.config import settings
from muster_plugin.kubelet import resource_locks, socket_directory

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_ALONE_AGAIN_S: Final = 0.05
RESOURCES_MAX: Final = 1000
_FILES_OF_OURS: Final = 128
_FILES_A_RESOURCE: Final = 8
"""Lock, socket and stream, which are 3; and for moments a probe and a registration."""


class CannotServe(Exception):
    """The world does not let the plugin start; the text says what was tried, and what to do."""


def node_name(told: str) -> str:
    """Return the node's name: as told, from NODE_NAME, or the host's. Raises CannotServe."""
    source = "settings" if told else "NODE_NAME"
    name = told or os.environ.get("NODE_NAME", "")
    if not name:
        source, name = "the host's name", socket.gethostname().lower()
    try:
        return msgspec.convert(name, vocabulary.NodeName)
    except msgspec.ValidationError:
        raise CannotServe(
            f"node: {name!r} (from {source}) is not a Kubernetes node name; "
            "give `node` in the settings or NODE_NAME in the environment"
        ) from None


def boot() -> str:
    """Return the id of this boot of the machine; empty if it is not told."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""


def check(chosen: settings.Settings) -> None:
    """Find out now what would end us after the registration. Raises CannotServe."""
    problem = socket_directory.problem(Path(chosen.kubelet.directory) / settings.SOCKET_DIRECTORY)
    if problem:
        raise CannotServe(f"kubelet.directory: {problem}")
    script = chosen.simulated_gpus and chosen.simulated_gpus.faults
    if script and not Path(script).parent.is_dir():
        raise CannotServe(f"simulated_gpus.faults: {Path(script).parent}: no such directory")
    http = chosen.http
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        socket.create_server((http.host, http.port), family=family).close()
    except OSError as error:
        told = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise CannotServe(f"http: {http.host}:{http.port}: {told}") from None


def resources_max() -> int:
    """Have as many files open as this process may; return how many resources that is enough for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return RESOURCES_MAX
    return max(1, min(RESOURCES_MAX, (most - _FILES_OF_OURS) // _FILES_A_RESOURCE))


async def be_alone(
    resources: Collection[str],
    folders: Sequence[Path],
    claimed: resource_locks.Claims,
    *,
    handover_s: float,
) -> None:
    """Claim these resources as soon as nobody else serves them.

    Raises CannotServe if that does not come in time. The kubelet would keep the newer registration,
    and drop it when the older one ends (k/k#121994); so there is no overlap, not even in a rolling
    update.
    """
    until = time.monotonic() + handover_s
    has_waited = False
    while other := _other(sorted(resources), folders, claimed):
        if time.monotonic() >= until:
            raise CannotServe(
                f"another plugin on this node serves {other}; end it first, or let this one "
                f"wait for its end with handover_s (now {handover_s:g})"
            )
        if not has_waited:
            logs.logger().info("waiting_for_another", serves=other, at_most_s=handover_s)
            has_waited = True
        await asyncio.sleep(_ALONE_AGAIN_S)


def _other(
    resources: Iterable[str], folders: Sequence[Path], claimed: resource_locks.Claims
) -> str:
    """Return what another plugin serves, and which does; empty if none does.

    Of two that start together each claims in the same order, so that one of them gets everything.
    """
    for name in resources:
        owner = claimed.claim(name)
        if owner:
            return f"{name} ({owner})"
    # one that knows no locks
    return next(iter(socket_directory.served(folders, {*map(settings.slug, resources)})), "")

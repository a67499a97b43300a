"""Adapter: checks before the process serves: node name, socket directory, no other plugin."""

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
from muster_plugin.kubelet import socket_directory

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_RETRY_S: Final = 0.05
RESOURCES_MAX: Final = 1000
_FILES_OF_PROCESS: Final = 128
_FILES_PER_RESOURCE: Final = 8
"""Lock, socket and stream are 3; a probe and a registration need more for a moment."""


class CannotServe(Exception):
    """The plugin cannot serve here; the text says what was tried and what to do."""


def node_name(configured: str) -> str:
    """Return the node's name: configured, from NODE_NAME, or the host's. Raises CannotServe."""
    source = "settings" if configured else "NODE_NAME"
    name = configured or os.environ.get("NODE_NAME", "")
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
    """Return the machine's boot id; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""


def check(chosen: settings.Settings) -> None:
    """Check early what would otherwise end the process after registration. Raises CannotServe."""
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
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise CannotServe(f"http: {http.host}:{http.port}: {reason}") from None


def resources_max() -> int:
    """Raise the open-file limit; return how many resources it is enough for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return RESOURCES_MAX
    return max(1, min(RESOURCES_MAX, (most - _FILES_OF_PROCESS) // _FILES_PER_RESOURCE))


async def acquire_resources(
    resources: Collection[str],
    folders: Sequence[Path],
    locks: socket_directory.ResourceLocks,
    *,
    handover_s: float,
) -> None:
    """Lock these resources as soon as no other plugin serves them.

    Raises CannotServe if that takes longer than `handover_s`. The kubelet would keep the newer
    registration, and drop it when the older one ends (k/k#121994); so there must be no overlap, not
    even in a rolling update.
    """
    until = time.monotonic() + handover_s
    has_waited = False
    while other := _other_owner(sorted(resources), folders, locks):
        if time.monotonic() >= until:
            raise CannotServe(
                f"another plugin on this node serves {other}; end it first, or let this one "
                f"wait for its end with handover_s (now {handover_s:g})"
            )
        if not has_waited:
            logs.logger().info("waiting_for_other_plugin", serves=other, at_most_s=handover_s)
            has_waited = True
        await asyncio.sleep(_RETRY_S)


def _other_owner(
    resources: Iterable[str], folders: Sequence[Path], locks: socket_directory.ResourceLocks
) -> str:
    """Return a resource that another plugin serves, and that plugin; empty without one.

    Two plugins that start together lock in the same order, so one of them gets everything.
    """
    for name in resources:
        owner = locks.acquire(name)
        if owner:
            return f"{name} ({owner})"
    # an older plugin may use no locks
    return next(
        iter(socket_directory.served_sockets(folders, {*map(settings.slug, resources)})), ""
    )

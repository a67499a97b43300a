"""Adapter for the process of the FUSE broker: reads settings and serves the node's pods."""

from muster.service import lean  # isort: skip  # before everything else

import asyncio
import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from muster.service import entry, logs, runtime
from muster_fuse import config, self_check
from muster_fuse.broker import service
from muster_fuse.kernel import mounter_client
from muster_fuse.volume import csi, volumes

lean.end_imports()


def main() -> int:
    """Run the broker; return the exit code."""
    return entry.main("fuse", config.Settings, serve)


async def serve(chosen: config.Settings) -> None:
    """Serve the node's pods until SIGTERM. Raises CannotStart."""
    node = entry.node_name(chosen.node)
    logs.configure("fuse", level=chosen.log.level, node=node)
    state, kubelet, stopping = Path(chosen.state), Path(chosen.kubelet.directory), asyncio.Event()
    _check(chosen)
    lean.import_bus()
    from muster_fuse import bus_reporter, metrics  # noqa: PLC0415  # see `lean`

    with _alone(state):
        reporting = bus_reporter.BusReporter(chosen, node, stopping=stopping)
        async with mounter_client.Mounter() as mounter:
            broker = service.Broker(
                chosen.limits, mounter, observe=reporting.observe, records=state / "mounts"
            )
            served = volumes.Volumes(state, Path(chosen.helper), broker, pods_max=chosen.pods_max)
            driver = csi.Driver(node, served, kubelet=str(kubelet), namespaces=chosen.namespaces)
            parts = metrics.Parts(
                broker=broker,
                mounter=mounter,
                served=served,
                driver=driver,
                offered=csi.offered(driver, kubelet),
                check=self_check.SelfCheck(
                    broker, mounter, state / "own.sock", period_s=chosen.self_test_s
                ),
            )
            try:
                await served.restore()
                await runtime.run(
                    parts.offered.run(),
                    broker.watch(),
                    parts.check.run(),
                    reporting.run(parts),
                    stop=stopping,
                )
            finally:
                await broker.stop()


def _check(chosen: config.Settings) -> None:
    """Raise CannotStart if there is a problem that a retry cannot solve."""
    if os.geteuid() != 0:
        raise entry.CannotStart("only root can mount: run as user 0, with CAP_SYS_ADMIN")
    if not Path(chosen.kubelet.directory).is_dir():
        raise entry.CannotStart(
            f"kubelet.directory: {chosen.kubelet.directory}: no such directory; "
            "is the kubelet's --root-dir mounted there?"
        )
    if not os.access(chosen.helper, os.R_OK):
        raise entry.CannotStart(
            f"helper: {chosen.helper}: no such file; `make -C services/fuse/helper` builds it"
        )


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Lock the state directory against a second broker on this node. Raises CannotStart."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise entry.CannotStart(f"state: {state}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise entry.CannotStart(f"state: another broker on this node uses {state}") from None
    try:
        yield
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())

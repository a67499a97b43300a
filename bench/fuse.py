"""Adapter for the FUSE broker: measures mount latency, throughput and cost.

Real: the broker's process with its mounter, the helper, the kernel, bindfs, a bus. Simulated: the
kubelet, which requests volumes, and pods, which are processes in namespaces and cgroups: see
`bench.fuse_node`. The benchmark needs root, and runs in its own mount namespace.

Compared operations alternate, so that other load on the machine affects both equally.
"""

import asyncio
import contextlib
import functools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import muster
import muster_fuse
from bench import fuse_node, programs, report
from tests.worlds import fuse_pods, fuse_process, mount_namespace

_SETTLE_S: Final = 6.0
"""The wait until the broker has checked its mounts again."""
_PIECE_MIB: Final = 64
_Copied = dict[str, tuple[list[float], list[float], list[float]]]
"""The milliseconds for each piece, by operation: in the pod, and in two reference containers."""
_MOUNTS_PER_POD: Final = 3
_MEMORY_MIB: Final = 45
_RATIO_MAX: Final = 1.02
_MOUNTED: Final = "from exec of fusermount3 until the program has /dev/fuse and sees the mount"
_UNMOUNTED: Final = "fusermount3 -u -q -z, until it has ended"
_REFERENCE: Final = "Debian's setuid fusermount3"


async def measure(options: report.Options, *, root: Path) -> list[report.Row]:
    """Run all measurements with one broker."""
    quick = options.quick
    async with (
        programs.arena("bench/fuse", muster, muster_fuse) as (_, url),
        fuse_node.running(root, url) as node,
    ):
        rows = await mounts(node, 50 if quick else 400)
        rows += await throughput(node, root, *((2, 128) if quick else (10, 1024)))
        rows += await cycles(node, 100 if quick else 1000)
        return rows + await many_pods(node, 10 if quick else 100, 6.0 if quick else 30.0)


async def mounts(node: fuse_node.Node, times: int) -> list[report.Row]:
    """Mount and unmount in a pod, alternating with a container that may mount by itself."""
    our: list[fuse_node.Cycle] = []
    their: list[fuse_node.Cycle] = []
    async with contextlib.AsyncExitStack() as stack:
        pod = await stack.enter_async_context(node.pod())
        pairs = [(our, stack.enter_context(pod.cycles()))]
        if fuse_node.REFERENCE.exists():
            reference = stack.enter_context(node.reference())
            pairs.append((their, stack.enter_context(reference.cycles())))

        def cycle() -> None:
            for samples, cycling in pairs * times:
                samples.append(next(cycling))

        await asyncio.to_thread(cycle)
    often = f"{times} in turn, a failure is {fuse_node.NEVER_MS / 1000:g} s; {_load()}"
    rows = _beside(
        "mount",
        [cycle.mount_ms for cycle in our],
        [cycle.mount_ms for cycle in their],
        how=f"{often}; {_MOUNTED}; {node.built.how}",
        median_target=30,
        target=100,
    )
    return rows + _beside(
        "unmount",
        [cycle.unmount_ms for cycle in our],
        [cycle.unmount_ms for cycle in their],
        how=f"{often}; {_UNMOUNTED}",
    )


async def throughput(node: fuse_node.Node, root: Path, times: int, mib: int) -> list[report.Row]:
    """Write and read through bindfs in a pod, alternating with the reference container."""
    programs_needed = (fuse_node.BINDFS, fuse_node.REFERENCE)
    if missing := [str(path) for path in programs_needed if not path.exists()]:
        return report.spread("bindfs", [], "s", how=f"not installed: {', '.join(missing)}")
    async with contextlib.AsyncExitStack() as stack:
        data = stack.enter_context(fuse_node.tmpfs(root / "data", 3 * mib + 16))
        pod = await stack.enter_async_context(node.pod(data))
        references = [stack.enter_context(node.reference(data)) for _ in range(2)]
        containers = (pod, *references)
        options = {stack.enter_context(container.bindfs()) for container in containers}
        samples: _Copied = {step: ([], [], []) for step in ("write", "read")}

        def copy() -> None:
            for _ in range(times):
                _copy(samples, containers, mib=mib)

        await asyncio.to_thread(copy)
    how = f"{times} files of {mib} MiB, piece by piece in turn: dd bs=1M, bindfs -o big_writes of"
    how += f" a tmpfs, caches dropped between; {_load()}; mount options of all: "
    how += options.pop() if len(options) == 1 else "different"
    how_ratio = f"medians; floor: of two containers that both mount by {_REFERENCE}"
    rows = []
    for step, (ours, theirs, again) in samples.items():
        rows += _beside(f"{step} of {_PIECE_MIB} MiB", ours, theirs, how=how)
        floor, *ratios = map(statistics.median, (theirs, ours, again))
        ratio, noise = (median / floor for median in ratios)
        title = f"{step}, in a pod to that by {_REFERENCE}"
        rows.append(
            report.row(title, ratio, "times", target=_RATIO_MAX, how=how_ratio, floor=noise)
        )
    return rows


def _copy(samples: _Copied, containers: Sequence[fuse_node.Container], *, mib: int) -> None:
    """Write and read a file in each container; add the milliseconds of each piece to `samples`."""
    named = [(number, container, f"file-{number}") for number, container in enumerate(containers)]
    for step, taken in samples.items():
        for at_mib in range(0, mib, _PIECE_MIB):
            for number, container, file in named:
                seconds = container.copied_s(step, file, mib=_PIECE_MIB, at_mib=at_mib)
                taken[number].append(seconds * 1000)
            # alternate the order
            named.reverse()
        for _, container, file in named:
            container.drop(file)
    for _, container, file in named:
        container.remove(file)


async def cycles(node: fuse_node.Node, times: int) -> list[report.Row]:
    """Count leaked resources after many mounts."""
    async with node.pod() as pod:
        await asyncio.sleep(_SETTLE_S)
        before = await asyncio.to_thread(node.open_files)
        with pod.cycles() as cycling:
            taken = await asyncio.to_thread(lambda: [next(cycling) for _ in range(times)])
        await asyncio.sleep(_SETTLE_S)
        after = await asyncio.to_thread(node.open_files)
        left = len(fuse_pods.connections(fuse_node.USER))
    failed = sum(fuse_node.NEVER_MS in cycle for cycle in taken)
    how = f"after {times} cycles of mount and unmount, {failed} failed; {_load()}"
    files = f"{how}; front and mounter had {before} before"
    return [
        report.row("cycles that failed", failed, "", target=0, how=how),
        report.row("descriptors left", after - before, "files", target=0, how=files),
        report.row("FUSE connections left", left, "", target=0, how=f"{how}; of the bench's user"),
    ]


async def many_pods(node: fuse_node.Node, pods: int, seconds: float) -> list[report.Row]:
    """Measure the broker's cost with many mounts, and with none."""
    await asyncio.sleep(_SETTLE_S)
    rows = _memory(node, "no pod", target=None)
    idle = await _cpu_percent(node, seconds)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(pods):
            pod = await stack.enter_async_context(node.pod())
            await asyncio.to_thread(stack.enter_context, pod.holds(_MOUNTS_PER_POD))
        await asyncio.sleep(_SETTLE_S)
        mounted = len(fuse_pods.connections(fuse_node.USER))
        title = f"{pods} pods, {mounted} mounts"
        rows += _memory(node, title, target=_MEMORY_MIB)
        busy = await _cpu_percent(node, seconds)
    how = f"{seconds:g} s, front and mounter; {_load()}; floor: no pod"
    rows.append(report.row(f"CPU, {title}", busy, "% of a core", how=how, floor=idle))
    return rows


def _beside(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    how: str,
    unit: str = "ms",
    median_target: float | None = None,
    target: float | None = None,
) -> list[report.Row]:
    """Return figures for a pod and for Debian's program, which is the floor of the former."""
    own = report.spread(
        f"{name} in a pod",
        ours,
        unit,
        how=f"{how}; floor: {_REFERENCE} in a container with /dev/fuse",
        median_target=median_target,
        target=target,
        floor=statistics.median(theirs) if theirs else None,
    )
    beside = "the same, in turn" if theirs else f"{fuse_node.REFERENCE} is not installed"
    return own + report.spread(f"{name} by {_REFERENCE}", theirs, unit, how=beside)


def _memory(node: fuse_node.Node, title: str, *, target: float | None) -> list[report.Row]:
    once = "front and mounter, each page once, however many others share it"
    share = "front and mounter, PSS: this program has Python and gRPC mapped, too"
    pss, distinct = sum(map(programs.proportional_mib, node.pids)), programs.distinct_mib(node.pids)
    return [
        report.row(f"memory, {title}", distinct, "MiB", target=target, how=once),
        report.row(f"memory, PSS, {title}", pss, "MiB", target=target, how=share),
    ]


async def _cpu_percent(node: fuse_node.Node, seconds: float) -> float:
    before, started = sum(map(programs.whole_cpu_s, node.pids)), time.perf_counter()
    await asyncio.sleep(seconds)
    used = sum(map(programs.whole_cpu_s, node.pids)) - before
    return used / (time.perf_counter() - started) * 100


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def main() -> int:
    """Run the benchmark; return the exit code."""
    if reason := fuse_pods.missing():
        sys.exit(f"bench.fuse: {reason}")
    with fuse_process.root() as root:
        bench = functools.partial(measure, root=root)
        return mount_namespace.inside(lambda: report.main("fuse", bench))


if __name__ == "__main__":
    sys.exit(main())

"""Adapter for a real cluster: measures the time from each fault to verdict, message and recovery.

make cluster && python -m bench.cluster [--quick] [--times 3] [--only crash,stop] [--json FILE]

The cluster is the one that `make cluster` starts (`scripts/cluster`): a real kubelet, API server,
scheduler and containerd; muster is the overlay `minimal` with a webhook on this machine. Settings
as in `bench.detection`: alerts follow verdicts immediately, without damping of flaps. A target is
1.5 times the time with the stand-ins (docs/health.md). `--times` is the number of injections of
each fault; a missing reaction counts as missed, and the next fault is injected.

| fault   | injection                                      | expected result              |
|---------|------------------------------------------------|------------------------------|
| crash   | the plugin's process is killed (1)             | PLUGIN_DOWN                  |
| stop    | the plugin's process is suspended              | STUCK                        |
| dead    | the kubelet is stopped                         | DEREGISTERED                 |
| restart | the kubelet is restarted                       | no alert                     |
| delete  | the plugin's pod is deleted                    | no alert                     |
| rollout | the DaemonSet is restarted                     | no alert                     |
| nats    | NATS is scaled to 0 replicas (patience: 20 s)  | `health_silent` (2)          |
| api     | the API server is killed for 10 s              | no alert; API read again     |

(1) If the kubelet restarts the process within 2 s, as it does the first time, the process is killed
again. The kubelet then waits 5 s before the restart.
(2) The notifier sends it directly, because NATS is unusable.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import report
from scripts.cluster import layout, node
from tests.worlds import cluster_faults, real_cluster
from tests.worlds.real_cluster import until

_CALM: Final = {"patience_s": 0, "flap_falls": 100, "hold_s": 0.1, "hold_max_s": 0.1}
_STAND_IN_S: Final = {"crash": (2.0, 2.8), "stop": (13.3, 15.7)}
"""Median and maximum in seconds with stand-ins for kubelet and API, from docs/health.md."""
_SLOWER: Final = 1.5
_RESOURCE: Final = "smarter-devices/fuse"
_VERDICTS: Final = {"crash": "PLUGIN_DOWN", "stop": "STUCK", "dead": "DEREGISTERED"}
_CGROUPS: Final = (
    Path("/sys/fs/cgroup/memory") / layout.CGROUP,
    Path("/sys/fs/cgroup") / layout.CGROUP,
)
_USAGES: Final = ("memory.usage_in_bytes", "memory.current")
"""The memory statistics of cgroup v1 and v2."""


@dataclass
class Samples:
    """Seconds from each fault to its consequences, by fault, and the false alerts."""

    verdict: dict[str, list[float]] = field(default_factory=dict)
    message: dict[str, list[float]] = field(default_factory=dict)
    recovery: dict[str, list[float]] = field(default_factory=dict)
    without: dict[str, list[float]] = field(default_factory=dict)
    """How many seconds the node offered no device after each fault."""
    false: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    """The load average of the last minute before each fault."""
    memory_mib: dict[str, float] = field(default_factory=dict)


class Rounds:
    """Injects the faults one after the other."""

    def __init__(self, muster: cluster_faults.Muster, offers: real_cluster.Offered) -> None:
        self.samples = Samples()
        self._muster, self._offers = muster, offers

    def make(self, fault: str) -> None:
        """Inject a fault once, and wait for the recovery."""
        self.samples.load.append(os.getloadavg()[0])
        self.samples.missed.setdefault(fault, 0)
        made: Callable[[float], object] = getattr(self, f"_{fault}")
        try:
            self._muster.until_healthy()
            began = time.monotonic()
            made(began)
            self._muster.until_healthy()
        except AssertionError as error:
            print(f"{fault}: {error}", file=sys.stderr)
            self.samples.missed[fault] += 1
        else:
            _add(self.samples.recovery, fault, time.monotonic() - began)

    def _crash(self, _: float) -> None:
        self._follow("crash", cluster_faults.crash_plugin(self._muster))

    def _stop(self, began: float) -> None:
        stopped = cluster_faults.kill_plugin(signal.SIGSTOP)
        try:
            self._follow("stop", began)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)

    def _dead(self, began: float) -> None:
        with cluster_faults.without_kubelet():
            self._follow("dead", began)

    def _restart(self, began: float) -> None:
        cluster = self._muster.cluster
        before = cluster.posted()
        cluster_faults.kubelet("restart")
        self._quiet("restart", began, lambda: cluster.posted() > before)

    def _delete(self, began: float) -> None:
        cluster = self._muster.cluster
        label = "app.kubernetes.io/name=muster-plugin"
        cluster.good("-n", "muster", "delete", "pod", "-l", label)
        self._quiet("delete", began, self._is_rolled_out)

    def _rollout(self, began: float) -> None:
        cluster = self._muster.cluster
        cluster.good("-n", "muster", "rollout", "restart", "daemonset/muster-plugin")
        self._quiet("rollout", began, self._is_rolled_out)

    def _nats(self, began: float) -> None:
        with cluster_faults.without_nats(self._muster.cluster):
            message = self._muster.until_notified(
                "health_silent", "firing", since=began, within_s=60.0
            )
        _add(self.samples.message, "nats", message.at - began)
        self._muster.until_notified("health_silent", "resolved", since=began, within_s=60.0)

    def _api(self, began: float) -> None:
        with cluster_faults.without_api(self._muster.cluster):
            until(self._muster.unread, "health cannot read", within_s=20.0)
            time.sleep(max(0.0, 10.0 - (time.monotonic() - began)))
        back = time.monotonic()
        until(lambda: not self._muster.unread(), "health reads again")
        _add(self.samples.verdict, "api: read again", time.monotonic() - back)
        self._quiet("api", began, lambda: True)

    def _follow(self, fault: str, began: float) -> None:
        verdict = _VERDICTS[fault]
        self._muster.until_verdict(verdict, within_s=90.0)
        _add(self.samples.verdict, fault, time.monotonic() - began)
        message = self._muster.until_notified(verdict.lower(), "firing", since=began, within_s=30.0)
        _add(self.samples.message, fault, message.at - began)

    def _quiet(self, fault: str, began: float, is_over: Callable[[], bool]) -> None:
        until(is_over, f"{fault} is over", within_s=90.0)
        self._muster.until_healthy()
        _add(self.samples.without, fault, self._offers.away_s(began))
        false = [each for each in self._muster.webhook.taken if each.at >= began]
        self.samples.false[fault] = self.samples.false.get(fault, 0) + len(false)

    def _is_rolled_out(self) -> bool:
        rollout = ("rollout", "status", "daemonset/muster-plugin", "--timeout=60s")
        return self._muster.cluster.ask("-n", "muster", *rollout)[0] == 0


_FAULTS: Final = ("crash", "stop", "dead", "restart", "delete", "rollout", "nats", "api")


def _add(samples: dict[str, list[float]], name: str, seconds: float) -> None:
    samples.setdefault(name, []).append(seconds)
    print(f"{name}: {seconds:.1f} s", file=sys.stderr)


def _memory_mib(cluster: real_cluster.Cluster) -> dict[str, float]:
    """Return the memory in the cgroup of each of muster's pods, without reclaimable files."""
    pods = cluster.get("pods", "", "-n", "muster")["items"]
    return {pod["metadata"]["name"]: _cgroup_bytes(pod["metadata"]["uid"]) / 2**20 for pod in pods}


def _cgroup_bytes(uid: str) -> int:
    for root in _CGROUPS:
        for folder in root.rglob(f"pod{uid}"):
            usage = next(folder / name for name in _USAGES if (folder / name).exists())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            inactive = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
            return int(usage.read_text()) - int(inactive)
    return 0


def _measured(faults: Sequence[str], times: int) -> Samples:
    cluster = real_cluster.Cluster(str(layout.KUBECONFIG))
    with (
        tempfile.TemporaryDirectory() as folder,
        _muster(cluster, Path(folder)) as muster,
        cluster.offered(_RESOURCE) as offers,
    ):
        rounds = Rounds(muster, offers)
        for fault in faults:
            for _ in range(times):
                rounds.make(fault)
        rounds.samples.memory_mib = _memory_mib(cluster)
        return rounds.samples


@contextlib.contextmanager
def _muster(cluster: real_cluster.Cluster, folder: Path) -> Iterator[cluster_faults.Muster]:
    yield from cluster_faults.installed(cluster, folder, _CALM)


def _rows(samples: Samples) -> list[report.Row]:
    rows: list[report.Row] = []
    for fault, seconds in samples.verdict.items():
        median, most = _STAND_IN_S.get(fault, (None, None))
        rows += report.spread(
            f"{fault}: verdict", seconds, "s", how=f"{len(seconds)} x, from the fault, by /state",
            median_target=_SLOWER * median if median else None,
            target=_SLOWER * most if most else None,
        )  # fmt: skip
    for name, measured, how in (
        ("message", samples.message, "from the fault until the webhook has it"),
        ("well again", samples.recovery, "from the fault"),
        ("without the device", samples.without, "the node's allocatable, by a watch"),
    ):
        for fault, seconds in measured.items():
            rows += report.spread(f"{fault}: {name}", seconds, "s", how=f"{len(seconds)} x, {how}")
    for name, counted, how in (
        ("false alerts", samples.false, "at the webhook"),
        ("missed", samples.missed, "a verdict, a message or the recovery did not come in time"),
    ):
        rows += [report.row(f"{f}: {name}", n, "", target=0, how=how) for f, n in counted.items()]
    for pod, mib in sorted(samples.memory_mib.items()):
        rows.append(
            report.row(f"memory of {pod}", mib, "MiB", how="its cgroup, less inactive files")
        )
    least, most = min(samples.load), max(samples.load)
    rows.append(report.row("load of the machine", most, "", how=f"at most; at least {least:.1f}"))
    return rows


async def _measure(options: argparse.Namespace, quick: report.Options) -> list[report.Row]:
    if node.first() is None:
        raise SystemExit("bench.cluster: no cluster runs: make cluster")
    faults = options.only.split(",") if options.only else list(_FAULTS)
    if quick.quick:
        faults = faults if options.only else ["crash"]
    return _rows(await asyncio.to_thread(_measured, faults, 1 if quick.quick else options.times))


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--times", type=int, default=2, help="injections of each fault")
    parser.add_argument("--only", default="", metavar="FAULT,FAULT", help=", ".join(_FAULTS))
    options, _ = parser.parse_known_args()
    return report.main("cluster", lambda quick: _measure(options, quick), more=parser)


if __name__ == "__main__":
    sys.exit(main())

"""The NVML adapters on a machine with a real GPU: `pytest -m gpu`; see docs/hardware.md.

The test observes for MUSTER_GPU_SOAK_S seconds, in a process of its own, since another test may
have loaded the fake library into this one.
"""

import os
import subprocess
import sys
from typing import Any, Final

import orjson
import pytest

from tests.worlds.nvml import fake

SOAK_S: Final = float(os.environ.get("MUSTER_GPU_SOAK_S", "5"))
_FAKED: Final = (fake.STATE, fake.COUNTS)
ASK: Final = """
import asyncio, collections, pathlib, resource, sys, time
import msgspec, orjson
from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import observer
from muster_plugin.model import gpu

SOAK_S, counts = float(sys.argv[1]), collections.Counter()

def memory():
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    rows = dict(line.split(":", 1) for line in status if line.startswith(("VmRSS", "RssAnon")))
    return {name: int(value.split()[0]) for name, value in rows.items()}

def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

def count_calls():
    import pynvml
    known = pynvml._nvmlGetFunctionPointer
    def counted(name):
        counts[name] += 1
        return known(name)
    pynvml._nvmlGetFunctionPointer = counted

async def late():
    worst = 0.0
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.02)
        worst = max(worst, time.monotonic() - began - 0.02)
        report["loop_late_ms"] = round(worst * 1000, 1)

async def main():
    rules = gpus.Gpus(health=gpus.Health(poll_s=1.0))
    source, observations = observer.NvmlSource(rules), []
    add = observations.append
    report["memory_before_kib"] = memory()
    began = time.monotonic()
    scan = await source.first_scan(60)
    report["first_scan_ms"] = round((time.monotonic() - began) * 1000, 1)
    report["memory_after_first_kib"] = memory()
    report["scan"] = msgspec.to_builtins(msgspec.structs.replace(scan, links={}))
    report["links"] = [[*pair, link.level.name, link.nvlinks] for pair, link in scan.links.items()]
    if scan.driver is gpu.Driver.READY:
        count_calls()
        running = [asyncio.ensure_future(source.observe(add)), asyncio.ensure_future(late())]
        used = cpu_s()
        await asyncio.wait(running, timeout=SOAK_S, return_when=asyncio.FIRST_COMPLETED)
        report["cpu_percent"] = round(100 * (cpu_s() - used) / SOAK_S, 3)
        report["ended_early"] = [repr(task.exception()) for task in running if task.done()]
        report["memory_after_soak_kib"] = memory()
        for task in running:
            task.cancel()
        now = time.monotonic()
        report["ages_s"] = {kind: round(now - at, 2) for kind, at in source.checked_at.items()}
        began = time.monotonic()
    await source.close()
    report["close_ms"] = round((time.monotonic() - began) * 1000, 1)
    report["calls_per_minute"] = {n: round(c * 60 / SOAK_S) for n, c in sorted(counts.items())}
    report["waits"] = counts["nvmlEventSetWait_v2"]
    report["observations"] = dict(collections.Counter(type(item).__name__ for item in observations))
    changes = [item for item in observations if isinstance(item, gpu.MonitoringChanged)]
    report["watch"] = msgspec.to_builtins(changes)
    polls = [item for item in observations if isinstance(item, gpu.Poll)]
    report["poll_errors"] = sorted({item.error for item in polls})
    report["polled"] = sorted({item.gpu for item in polls})
    report["last_poll"] = msgspec.to_builtins(polls[-1]) if polls else None

report = {}
asyncio.run(main())
sys.stdout.buffer.write(orjson.dumps(report))
"""


@pytest.mark.gpu
@pytest.mark.timeout(SOAK_S + 120)
def test_a_real_gpu_is_found_registered_polled_and_soaked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in _FAKED}
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(SOAK_S)], capture_output=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    report: dict[str, Any] = orjson.loads(done.stdout)
    scan = report["scan"]
    if scan["driver"] != "ready":
        pytest.skip(f"no GPU is available here: {scan['problem']}")
    with capsys.disabled():
        sys.stdout.write(f"\n{orjson.dumps(report, option=orjson.OPT_INDENT_2).decode()}\n")
    uuids = sorted(device["uuid"] for device in scan["gpus"])
    assert uuids
    assert all(device["memory_mib"] for device in scan["gpus"])
    assert [poll["error"] for poll in scan["polls"]] == [""] * len(uuids)
    assert (report["ended_early"], report["poll_errors"], report["watch"]) == ([], [""], [])
    assert report["polled"] == uuids
    # two slices a second, and never more
    assert report["waits"] <= 2 * SOAK_S + 5
    assert report["loop_late_ms"] < 500
    assert report["close_ms"] < 2000

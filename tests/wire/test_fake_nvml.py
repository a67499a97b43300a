"""The fake libnvidia-ml.so.1, called by the real pynvml in a process of its own."""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from tests.worlds.nvml import fake, scenes

SPEAKER: Final = """
import ast, concurrent.futures, ctypes, os, sys, time, orjson
from pynvml import *

pool = concurrent.futures.ThreadPoolExecutor()

def gpu(n):
    return nvmlDeviceGetHandleByIndex(n)

def mig(n, slot):
    return nvmlDeviceGetMigDeviceHandleByIndex(gpu(n), slot)

def values(handle, *fields):
    found = nvmlDeviceGetFieldValues(handle, fields)
    return [v.value.ullVal if v.nvmlReturn == 0 else {"error": v.nvmlReturn} for v in found]

def listener(*gpus, mask=8):
    made = nvmlEventSetCreate()
    for n in gpus:
        nvmlDeviceRegisterEvents(gpu(n), mask, made)
    return made

def heard(a_set, ms=0):
    e = nvmlEventSetWait_v2(a_set, ms)
    uuid = attempt(lambda: nvmlDeviceGetUUID(e.device))
    return [uuid, e.eventType, e.eventData, e.gpuInstanceId, e.computeInstanceId]

def attempt(call):
    try:
        return call()
    except NVMLError as error:
        return {"error": error.value}

def plain(thing):
    if isinstance(thing, ctypes.Structure):
        return {name: getattr(thing, name) for name, *_ in thing._fields_}
    return list(thing) if isinstance(thing, ctypes.Array) else None

def run(code):
    *before, last = ast.parse(code).body
    exec(compile(ast.Module(before, []), "asked", "exec"), globals())
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "asked", "eval"), globals())
    exec(compile(ast.Module([last], []), "asked", "exec"), globals())

for line in sys.stdin:
    answer = attempt(lambda: run(orjson.loads(line)))
    print(orjson.dumps(answer, default=plain).decode(), flush=True)
os._exit(0)
"""
XID: Final = 8
NONE: Final = 0xFFFFFFFF


class Node:
    """A node whose driver is the fake, and a process on it that uses pynvml."""

    def __init__(self, expected: fake.Fake, process: subprocess.Popen[bytes]) -> None:
        self.fake = expected
        self.process = process

    def say(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(orjson.dumps(code) + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        return orjson.loads(self.process.stdout.readline())

    def ask(self, code: str) -> Any:
        self.say(code)
        return self.receive()

    def until(self, called: str, times: int = 1) -> None:
        """Wait until the library has been called this often by this name."""
        while self.fake.counts().get(called, 0) < times:
            time.sleep(0.002)


@pytest.fixture(scope="session")
def built() -> Path:
    try:
        return fake.built()
    except fake.NoCompiler as reason:
        pytest.skip(str(reason))


@pytest.fixture
def node(built: Path, tmp_path: Path) -> Iterator[Node]:
    expected = fake.Fake(tmp_path / "state")
    with started(expected, built) as process:
        yield Node(expected, process)


@contextlib.contextmanager
def started(expected: fake.Fake, built: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", SPEAKER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, **expected.environment(built)}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(10)


def up(node: Node, scene: scenes.Scene) -> None:
    node.fake.write(scene)
    assert node.ask("nvmlInit()") is None


def error(code: int) -> dict[str, int]:
    return {"error": code}


def test_a_scene_is_what_pynvml_discovers(node: Node) -> None:
    up(node, scenes.h100x8().but(0, serial="1650001", used=1 << 30))
    assert node.ask("nvmlSystemGetDriverVersion(), nvmlSystemGetCudaDriverVersion()") == [
        "580.95.05",
        13000,
    ]
    assert node.ask("nvmlDeviceGetCount()") == 8
    assert node.ask("[nvmlDeviceGetUUID(gpu(n)) for n in range(8)]") == [
        scenes.GPU_UUID.format(n) for n in range(8)
    ]
    assert node.ask("[nvmlDeviceGetMinorNumber(gpu(n)) for n in range(8)]") == [
        *(3, 4, 5, 6, 7, 0, 1, 2)
    ]
    discovered = node.ask(
        "h = gpu(0); [nvmlDeviceGetName(h), nvmlDeviceGetIndex(h), nvmlDeviceGetSerial(h),"
        " nvmlDeviceGetCudaComputeCapability(h), nvmlDeviceGetArchitecture(h),"
        " nvmlDeviceGetBrand(h), nvmlDeviceGetMigMode(h), nvmlDeviceGetNumaNodeId(h)]"
    )
    assert discovered == ["NVIDIA H100 80GB HBM3", 0, "1650001", [9, 0], 9, 14, [0, 0], 0]
    assert node.ask("nvmlDeviceGetPciInfo(gpu(0))") == {
        "busIdLegacy": "0000:1B:00.0",
        "domain": 0,
        "bus": 0x1B,
        "device": 0,
        "pciDeviceId": 0x233010DE,
        "pciSubSystemId": 0x16C110DE,
        "busId": "00000000:1B:00.0",
    }
    total, reserved, used = 85520809984, 556793856, 1 << 30
    free = total - reserved - used
    assert node.ask("nvmlDeviceGetMemoryInfo(gpu(0))") == {
        "total": total,
        "free": free,
        "used": used + reserved,
    }
    assert node.ask("nvmlDeviceGetMemoryInfo(gpu(0), nvmlMemory_v2)") == {
        "version": 0x02000028,
        "total": total,
        "reserved": reserved,
        "free": free,
        "used": used,
    }


def test_a_gpu_is_found_by_uuid_bus_and_serial(node: Node) -> None:
    up(node, scenes.a100_mig().but(2, serial="77"))
    mig = node.fake.scene.mig_uuid(0, 2)
    assert node.ask(f"nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID('{scenes.GPU_UUID}'))") == (
        error(6)
    )
    queried = (
        f"nvmlDeviceGetHandleByUUID('{scenes.GPU_UUID.format(202)}')",
        "nvmlDeviceGetHandleByPciBusId('0000:47:00.0')",
        "nvmlDeviceGetHandleBySerial(b'77')",
    )
    assert [node.ask(f"nvmlDeviceGetIndex({how})") for how in queried] == [2, 2, 2]
    assert node.ask(f"nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID('{mig}'))") == mig
    assert node.ask("gpu(3)") == error(2)


def test_nothing_answers_before_the_first_init_and_after_the_last_shutdown(node: Node) -> None:
    node.fake.write(scenes.t4())
    assert node.ask("nvmlDeviceGetCount()") == error(1)
    assert node.ask("nvmlInit(); nvmlInit(); nvmlShutdown(); nvmlDeviceGetCount()") == 1
    assert node.ask("h = gpu(0); nvmlShutdown(); nvmlDeviceGetCount()") == error(1)
    assert node.ask("nvmlShutdown()") == error(1)
    assert node.ask("nvmlInit(); nvmlDeviceGetName(h)") == error(2)
    assert node.fake.misuses() == {"stale_handle": 1}


def test_a_driver_that_is_not_loaded_is_loaded_later(node: Node) -> None:
    assert node.ask("nvmlInit()") == error(9)
    node.fake.write(scenes.t4().also("init 18"))
    assert node.ask("nvmlInit()") == error(18)
    node.fake.drop("init")
    assert node.ask("nvmlInit(); nvmlDeviceGetName(gpu(0))") == "Tesla T4"
    node.fake.unload()
    assert node.ask("nvmlDeviceGetCount()") == error(9)


def test_a_driver_loaded_again_wants_everybody_to_begin_again(node: Node) -> None:
    up(node, scenes.t4())
    node.fake.add("epoch 1 999")
    assert node.ask("nvmlDeviceGetCount()") == error(999)
    assert node.ask("nvmlInit(); nvmlShutdown(); nvmlDeviceGetCount()") == error(999)
    assert node.ask("nvmlShutdown(); nvmlInit(); nvmlDeviceGetCount()") == 1


def test_the_gpus_are_those_of_init_unless_hot_plugged(node: Node) -> None:
    whole = scenes.h100x8()
    up(node, whole.without(7))
    node.fake.write(whole)
    assert node.ask("nvmlDeviceGetCount()") == 7
    node.fake.write(whole.without(2, 7))
    assert node.ask("nvmlDeviceGetCount(), attempt(lambda: gpu(2))") == [7, error(15)]
    node.fake.write(whole.without(2).also("hotplug 1"))
    assert node.ask("nvmlDeviceGetUUID(gpu(6))") == scenes.GPU_UUID.format(7)


def test_a_lost_gpu_fails_at_every_call_and_disturbs_no_other(node: Node) -> None:
    up(node, scenes.h100x8())
    assert node.ask("h = gpu(1); s = listener(0, 1)") is None
    node.fake.add("lost 1")
    for call in ("gpu(1)", "nvmlDeviceGetName(h)", "nvmlDeviceGetFieldValues(h, [230])"):
        assert node.ask(call) == error(15)
    assert node.ask("nvmlDeviceGetName(gpu(0)), nvmlDeviceGetCount()") == [
        "NVIDIA H100 80GB HBM3",
        8,
    ]
    assert node.ask("nvmlDeviceGetTopologyCommonAncestor(gpu(0), h)") == error(15)
    assert node.ask("[attempt(lambda: heard(s, 60000)) for _ in range(3)]") == [error(15)] * 3
    node.fake.drop("lost")
    assert node.ask("heard(s)") == error(10)


def test_an_xid_is_heard_before_the_loss_that_follows(node: Node) -> None:
    up(node, scenes.h100x8())
    node.ask("s = listener(0)")
    node.fake.xid(0, 79)
    node.fake.add("lost 0")
    assert node.ask("heard(s)")[1:] == [XID, 79, NONE, NONE]
    assert node.ask("heard(s, 60000)") == error(15)


def test_an_error_holds_for_its_call_its_gpu_and_its_number_of_times(node: Node) -> None:
    up(node, scenes.h100x8().also("error call=nvmlDeviceGetMemoryInfo gpu=0 code=15"))
    assert node.ask("attempt(lambda: nvmlDeviceGetMemoryInfo(gpu(0)))") == error(15)
    assert node.ask("nvmlDeviceGetMemoryInfo(gpu(1)).total") == 85520809984
    node.fake.add("error call=nvmlDeviceGetCount code=999 times=2")
    counted = "[attempt(nvmlDeviceGetCount) for _ in range(3)]"
    assert node.ask(counted) == [error(999), error(999), 8]
    node.fake.add("error code=18")
    assert node.ask("nvmlSystemGetDriverVersion()") == error(18)
    assert node.ask("nvmlShutdown(); nvmlInit()") is None


def test_a_call_that_hangs_blocks_no_other(node: Node) -> None:
    up(node, scenes.h100x8())
    node.ask("h, other = gpu(0), gpu(1)")
    node.fake.add("hang call=nvmlDeviceGetName gpu=0")
    node.ask("hung = pool.submit(nvmlDeviceGetName, h); None")
    node.until("nvmlDeviceGetName")
    assert node.ask("nvmlDeviceGetName(other), hung.done()") == ["NVIDIA H100 80GB HBM3", False]
    node.fake.drop("hang")
    assert node.ask("hung.result()") == "NVIDIA H100 80GB HBM3"
    assert node.fake.peak() == 2


def test_a_call_may_hang_for_a_time(node: Node) -> None:
    up(node, scenes.t4())
    node.fake.add("hang call=nvmlDeviceGetCount ms=60 times=1")
    took = "start = time.monotonic(); nvmlDeviceGetCount(); time.monotonic() - start"
    assert node.ask(took) >= 0.059
    assert node.ask("nvmlDeviceGetCount()") == 1


def test_mig_devices_have_holes_profiles_and_attributes(node: Node) -> None:
    up(node, scenes.a100_mig())
    slots = "[attempt(lambda: nvmlDeviceGetName(mig(0, n))) for n in range(8)]"
    name = "NVIDIA A100-SXM4-40GB MIG "
    named = [name + profile for profile in ("1g.5gb", "2g.10gb", "1c.3g.20gb", "2c.3g.20gb")]
    assert node.ask(slots) == [named[0], error(6), *named[1:], error(6), error(6), error(2)]
    node.fake.write(node.fake.scene.but(0, hole=2))
    assert node.ask("mig(0, 1)") == error(2)
    assert node.ask("[nvmlDeviceGetMaxMigDeviceCount(gpu(n)) for n in range(3)]") == [7, 7, 0]
    assert node.ask("nvmlDeviceGetAttributes(mig(0, 4))") == {
        "multiprocessorCount": 28,
        "sharedCopyEngineCount": 3,
        "sharedDecoderCount": 2,
        "sharedEncoderCount": 0,
        "sharedJpegCount": 0,
        "sharedOfaCount": 0,
        "gpuInstanceSliceCount": 3,
        "computeInstanceSliceCount": 2,
        "memorySizeMB": 19968,
    }
    assert node.ask(
        "m = mig(0, 4);"
        "[nvmlDeviceGetGpuInstanceId(m), nvmlDeviceGetComputeInstanceId(m),"
        " bool(nvmlDeviceIsMigDeviceHandle(m)), bool(nvmlDeviceIsMigDeviceHandle(gpu(0))),"
        " nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m))]"
    ) == [2, 1, True, False, 0]


def test_a_mig_device_names_the_profiles_it_was_cut_by(node: Node) -> None:
    up(node, scenes.a100_mig())
    node.ask("gi = nvmlDeviceGetGpuInstanceById(gpu(0), 2)")
    node.ask("ci = nvmlGpuInstanceGetComputeInstanceById(gi, 1)")
    assert node.ask(
        "nvmlGpuInstanceGetInfo(gi).profileId, nvmlComputeInstanceGetInfo(ci).profileId"
    ) == [9, 1]
    profiles = "[attempt(lambda: nvmlDeviceGetGpuInstanceProfileInfo(gpu(0), n)) for n in ns]"
    existing = node.ask(f"ns = (2, 5, 18); {profiles}")
    assert (existing[0]["id"], existing[0]["name"], existing[0]["memorySizeMB"]) == (
        9,
        "MIG 3g.20gb",
        19968,
    )
    assert existing[1:] == [error(3), error(2)]
    old = node.ask("nvmlDeviceGetGpuInstanceProfileInfo(gpu(0), 2, version=1)")
    assert (old["id"], old["sliceCount"], old["instanceCount"]) == (9, 3, 2)
    compute = node.ask("nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 1, 0)")
    assert (compute["id"], compute["name"], compute["sliceCount"]) == (1, "MIG 2c.3g.20gb", 2)
    assert node.ask("nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 4, 0)") == error(3)
    assert node.ask("nvmlDeviceGetGpuInstanceById(gpu(0), 5)") == error(6)


def test_a_handle_of_a_mig_device_that_is_gone_is_invalid(node: Node) -> None:
    scene = scenes.a100_mig()
    up(node, scene)
    node.ask("m = mig(0, 2)")
    recut = scenes.Mig(profile=scenes.A100_40GB[1], slot=2, gi=4)
    node.fake.write(scene.carved(0, recut))
    assert node.ask("nvmlDeviceGetUUID(m)") == error(2)
    assert node.ask("nvmlDeviceGetUUID(mig(0, 2))") == node.fake.scene.mig_uuid(0, 2)
    node.fake.write(scene.whole(0))
    assert node.ask("nvmlDeviceGetMigMode(gpu(0)), attempt(lambda: mig(0, 2))") == [
        [0, 0],
        error(2),
    ]


def test_some_calls_take_no_mig_handle_and_some_no_gpu_that_is_cut(node: Node) -> None:
    up(node, scenes.a100_mig())
    for call in ("GetMinorNumber(mig(0, 0))", "GetTemperature(mig(0, 0), 0)"):
        assert node.ask(f"nvmlDevice{call}") == error(2)
    assert node.ask("nvmlDeviceRegisterEvents(mig(0, 0), 8, nvmlEventSetCreate())") == error(2)
    for call in ("GetUtilizationRates", "GetRemappedRows"):
        assert node.ask(f"nvmlDevice{call}(gpu(0))") == error(3)
    assert node.ask("nvmlDeviceGetRemappedRows(gpu(2))") == [0, 0, 0, 0]


PEERS: Final = """
def peers(n):
    buses = [nvmlDeviceGetPciInfo(gpu(m)).busId for m in range(8)]
    found = [0] * 8
    for link in range(18):
        far = attempt(lambda: nvmlDeviceGetNvLinkRemotePciInfo(gpu(n), link))
        if not isinstance(far, dict) and far.busId in buses:
            found[buses.index(far.busId)] += 1
    return found
"""


def test_direct_nvlinks_lead_to_their_peers(node: Node) -> None:
    up(node, scenes.dgx1())
    node.ask(PEERS)
    matrix = node.ask("[peers(n) for n in range(8)]")
    assert ["".join(map(str, row)) for row in matrix] == list(scenes.DGX1_NVLINKS)
    assert node.ask("nvmlDeviceGetNvLinkRemoteDeviceType(gpu(0), 0)") == 0
    assert node.ask("nvmlDeviceGetNvLinkState(gpu(0), 6)") == error(2)
    ancestor = "nvmlDeviceGetTopologyCommonAncestor"
    assert node.ask(f"[{ancestor}(gpu(0), gpu(n)) for n in (1, 2, 4)]") == [10, 30, 50]
    assert node.ask("[nvmlDeviceGetP2PStatus(gpu(0), gpu(n), 2) for n in (1, 7)]") == [0, 5]


def test_links_to_switches_lead_to_no_peer_and_may_be_down(node: Node) -> None:
    up(node, scenes.h100x8().also("nvlink 0 3 state=0 errors=5"))
    node.ask(PEERS)
    assert node.ask("peers(0)") == [0] * 8
    states = "[attempt(lambda: nvmlDeviceGetNvLinkState(gpu(0), n)) for n in range(19)]"
    assert node.ask(states) == [1, 1, 1, 0, *[1] * 14, error(2)]
    assert node.ask("nvmlDeviceGetNvLinkRemoteDeviceType(gpu(0), 0)") == 2
    assert node.ask("nvmlDeviceGetNvLinkErrorCounter(gpu(0), 3, 2)") == 5
    assert node.ask("nvmlDeviceGetNvLinkVersion(gpu(0), 0)") == 4
    node.fake.write(scenes.t4())
    assert node.ask("nvmlShutdown(); nvmlInit(); nvmlDeviceGetNvLinkState(gpu(0), 0)") == error(3)


POLL: Final = """
def poll(n):
    h = gpu(n)
    calls = [
        lambda: values(h, 230, 31, 142, 143, 144, 145),
        lambda: nvmlDeviceGetRemappedRows(h),
        lambda: nvmlDeviceGetTotalEccErrors(h, 1, 0),
        lambda: nvmlDeviceGetCurrentClocksEventReasons(h),
        lambda: nvmlDeviceGetTemperature(h, 0),
        lambda: nvmlDeviceGetTemperatureThreshold(h, 1),
        lambda: nvmlDeviceGetRetiredPagesPendingStatus(h),
        lambda: nvmlDeviceGetPcieReplayCounter(h),
    ]
    return [attempt(call) for call in calls]
"""


def test_what_is_polled_is_what_was_reported(node: Node) -> None:
    up(node, scenes.h100x8())
    node.ask(POLL)
    assert node.ask("poll(0)") == [
        [0, error(3), 0, 0, 0, 0],
        [0, 0, 0, 0],
        *(0, 0, 35, 92),
        error(3),
        0,
    ]
    node.fake.write(
        node.fake.scene.but(
            *(0,), recovery=1, remap="1,2,1,0", ecc=7, throttle=0x48, temp="!15", replay=4
        )
    )
    assert node.ask("poll(0)") == [
        [1, error(3), 1, 2, 1, 0],
        [1, 2, 1, 0],
        *(7, 0x48, error(15), 92),
        error(3),
        4,
    ]
    assert node.ask("poll(1)")[2:5] == [0, 0, 35]


def test_an_old_gpu_does_not_know_what_came_after_it(node: Node) -> None:
    up(node, scenes.t4())
    node.ask(POLL)
    assert node.ask("poll(0)") == [
        [error(3), 0, *[error(3)] * 4],
        error(3),
        *(0, 0, 35, 93, 0, 0),
    ]
    assert node.ask("nvmlDeviceGetMigMode(gpu(0))") == error(3)


def test_sram_errors_are_reported_with_their_threshold(node: Node) -> None:
    up(node, scenes.h100x8().but(0, sram=3, sram_exceeded=1))
    node.ask("s = c_nvmlEccSramErrorStatus_v1_t()")
    assert node.ask("nvmlDeviceGetSramEccErrorStatus(gpu(0), byref(s))") == 0
    assert node.ask("s.volatileUncParity, s.bThresholdExceeded") == [3, 1]
    assert node.ask("nvmlDeviceGetTemperatureV(gpu(0), 0)") == 35


def test_a_field_may_answer_otherwise_than_its_getter(node: Node) -> None:
    expected = scenes.h100x8().but(0, recovery=2)
    expected = expected.also("field 0 id=230 value=4", "field * id=150 value=9 type=3")
    up(node, expected.also("field 1 id=144 code=999"))
    assert node.ask("values(gpu(0), 230, 150)") == [4, 9]
    assert node.ask("values(gpu(1), 230, 144, 300)") == [0, error(999), error(3)]
    assert node.ask("nvmlDeviceGetFieldValues(gpu(0), [150])[0].valueType") == 3


def test_the_fabric_is_reported_in_every_version(node: Node) -> None:
    cluster = "00112233-4455-6677-8899-aabbccddeeff"
    up(node, scenes.h100x8().but(0, cluster=cluster, clique=7, fabric_health=0x1AA))
    for made, called in (
        ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
        ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("c_nvmlGpuFabricInfo_v3_t", "nvmlDeviceGetGpuFabricInfoV"),
    ):
        discovered = node.ask(f"f = {made}(); {called}(gpu(0), byref(f)); f")
        assert bytes(discovered["clusterUuid"]).hex() == cluster.replace("-", "")
        assert (discovered["state"], discovered["status"], discovered["cliqueId"]) == (3, 0, 7)
        assert discovered.get("healthMask", 0x1AA) == 0x1AA
    assert node.ask("f.version = 9; nvmlDeviceGetGpuFabricInfoV(gpu(0), byref(f))") == error(25)


def test_an_event_reaches_every_set_of_its_gpu_once_and_none_from_before(node: Node) -> None:
    up(node, scenes.h100x8())
    node.fake.xid(0, 13)
    node.ask("a, b, c = listener(0, 1), listener(0), listener(1)")
    node.fake.xid(0, 31)
    node.fake.xid(0, 48, gi=3, ci=0)
    first = [scenes.GPU_UUID.format(0), XID, 31, NONE, NONE]
    second = [scenes.GPU_UUID.format(0), XID, 48, 3, 0]
    for listener in "ab":
        queried = f"[attempt(lambda: heard({listener})) for _ in range(3)]"
        assert node.ask(queried) == [first, second, error(10)]
    assert node.ask("heard(c)") == error(10)


def test_an_xid_wakes_who_waits(node: Node) -> None:
    up(node, scenes.h100x8())
    node.ask("s = listener(*range(8))")
    node.say("heard(s, 30000)")
    node.fake.xid(5, 79)
    assert node.receive() == [scenes.GPU_UUID.format(5), XID, 79, NONE, NONE]


def test_only_what_is_supported_can_be_registered_and_only_that_is_heard(node: Node) -> None:
    up(node, scenes.h100x8().but(0, events=0x108).but(1, events=0))
    assert node.ask("[nvmlDeviceGetSupportedEventTypes(gpu(n)) for n in (0, 1)]") == [0x108, 0]
    assert node.ask("listener(0, mask=0xA)") == error(3)
    assert node.ask("listener(1)") == error(3)
    node.ask("s, t = listener(0), listener(0, mask=0x100)")
    node.fake.event(0, 0x100, data=1)
    assert node.ask("heard(s)") == error(10)
    assert node.ask("heard(t)")[1:3] == [0x100, 1]


def test_an_event_may_name_a_device_that_nothing_knows(node: Node) -> None:
    up(node, scenes.t4())
    node.ask("s = listener(0)")
    node.fake.xid(0, 79, more="nowhere=1")
    assert node.ask("heard(s)") == [error(2), XID, 79, NONE, NONE]


def test_a_set_is_of_no_use_after_registering_ended_in_unknown(node: Node) -> None:
    up(node, scenes.t4().also("error call=nvmlDeviceRegisterEvents code=999 times=1"))
    node.ask("s = nvmlEventSetCreate()")
    assert node.ask("nvmlDeviceRegisterEvents(gpu(0), 8, s)") == error(999)
    assert node.ask("nvmlDeviceRegisterEvents(gpu(0), 8, s)") == error(999)
    assert node.ask("nvmlEventSetFree(s); heard(listener(0))") == error(10)
    assert node.fake.misuses() == {"undefined_set": 1}


def test_a_wait_may_be_cut_short(node: Node) -> None:
    up(node, scenes.t4().also("wait_cut 5"))
    assert node.ask("heard(listener(0), 60000)") == error(10)


def test_calls_failures_and_misuse_are_counted(node: Node) -> None:
    up(node, scenes.t4())
    node.ask("h = gpu(0); nvmlDeviceGetName(h); nvmlDeviceGetName(h); None")
    node.ask("nvmlDeviceGetMigMode(h)")
    assert node.fake.counts() == {
        "nvmlInitWithFlags": 1,
        "nvmlDeviceGetHandleByIndex_v2": 1,
        "nvmlDeviceGetName": 2,
        "nvmlDeviceGetMigMode": 1,
    }
    assert node.fake.failures() == {"nvmlDeviceGetMigMode": 1}
    assert node.fake.misuses() == {}
    node.fake.add("hang call=nvmlDeviceGetName")
    node.ask("hung = pool.submit(attempt, lambda: nvmlDeviceGetName(h)); None")
    node.until("nvmlDeviceGetName", 3)
    node.ask("s = listener(0); receiving = pool.submit(heard, s, 30000); None")
    node.until("nvmlEventSetWait_v2")
    assert node.ask("heard(s)") == error(10)
    node.fake.xid(0, 79)
    assert node.ask("receiving.result()")[2] == 79
    assert node.ask("nvmlEventSetFree(s), nvmlShutdown()") == [None, None]
    node.fake.drop("hang")
    assert node.ask("hung.result()") == error(1)
    assert node.ask("heard(s)") == error(1)
    assert node.fake.misuses() == {"two_waiters": 1, "shutdown_in_flight": 1}


def test_a_fork_does_not_inherit_what_was_initialised(node: Node) -> None:
    up(node, scenes.t4())
    queried = """
if (child := os.fork()) == 0:
    os._exit(attempt(nvmlDeviceGetCount)["error"])
os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
    assert node.ask(queried) == 1
    assert node.fake.misuses() == {"forked": 1}


def test_waiting_costs_no_processor_time(node: Node) -> None:
    up(node, scenes.h100x8())
    node.ask("s = listener(*range(8))")
    spent = "start = time.process_time(); attempt(lambda: heard(s, 250)); "
    assert node.ask(f"{spent} time.process_time() - start") < 0.1
    assert node.fake.counts()["nvmlEventSetWait_v2"] == 1


@pytest.mark.parametrize(
    "line",
    ["oops 1", "gpu 1 colour=red", "error call=nvmlOops code=1", "gpu 3 minor=x", "xid gpu=0"],
)
def test_a_line_that_is_not_understood_ends_the_process(node: Node, line: str) -> None:
    node.fake.write(scenes.t4().also(line))
    node.say("nvmlInit()")
    _, output = node.process.communicate(timeout=30)
    assert node.process.returncode == -6
    assert line in output.decode()


def test_without_a_compiler_the_reason_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fake.NoCompiler, match="there is no `cc` in the PATH"):
        fake.built(tmp_path)


def test_parallel_builders_get_one_whole_library(built: Path, tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = set(pool.map(fake.built, [tmp_path] * 2))
    assert made == {tmp_path / built.parent.name / fake.SONAME}
    assert [entry.name for entry in tmp_path.iterdir()] == [built.parent.name]

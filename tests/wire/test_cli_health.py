"""`muster status` and `muster why`, on a real NATS server and a real health service."""

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from muster import RUNBOOKS_URL, vocabulary
from muster.local import nats, running
from muster.nats import bus
from muster.vocabulary import Health
from tests.worlds import muster_command

GPU = "nvidia.com/gpu"
PLUGIN = "device-plugin"
SETTINGS = """
bus: {{url: "{url}"}}
detection: {{probe_timeout_s: 0.5, interval_s: 0.2, patience_s: 0}}
"""


def muster(directory: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run the command so that it finds only a `muster up` in this directory."""
    unset = {"NATS_URL", "MUSTER_HEALTH_URL", "http_proxy"}
    inherited = {key: value for key, value in os.environ.items() if key not in unset}
    return muster_command.muster(
        *arguments, environment={**inherited, "TMPDIR": str(directory), **environment}
    )


@contextlib.asynccontextmanager
async def stack(directory: Path) -> AsyncIterator[tuple[bus.Bus, str, str]]:
    """Run NATS and health, with the record of a `muster up`; yield a bus and both addresses."""
    files = directory / "muster-here"
    files.mkdir()
    async with (
        asyncio.timeout(100),
        contextlib.AsyncExitStack() as opened,
        nats.NatsServer(directory / "nats") as server,
        bus.Bus(server.url, producer=f"plugins/{PLUGIN}", name="test", owner=True) as link,
    ):
        # `muster up` holds this lock while it runs
        lock = opened.enter_context((files / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        (files / "health.yaml").write_text(SETTINGS.format(url=server.url))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "muster_health", "--config", str(files / "health.yaml")),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        http = orjson.loads(await process.stdout.readline())["http"]
        record = running.Running(
            directory=str(files),
            owner=os.getpid(),
            nats_url=server.url,
            nodes=(),
            programs=(running.Program(name="health", pid=process.pid, http=http),),
        )
        running.write(record)
        draining = asyncio.create_task(process.stdout.read())
        try:
            yield link, http, server.url
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await draining


async def heartbeat_until_listed(link: bus.Bus, directory: Path, node: str) -> None:
    """Send heartbeats until health lists the plugin, and none after."""
    for seq in range(1, 100):
        await link.send_heartbeat(
            vocabulary.Heartbeat(
                node=node,
                plugin=PLUGIN,
                instance=link.instance,
                seq=seq,
                interval_s=0.2,
                resources=(
                    vocabulary.ResourceBeat(
                        name=GPU, streams=1, probe_ok=True, probe_age_s=0.0, devices=1, healthy=1
                    ),
                ),
            )
        )
        if (await status(directory))["plugins_total"]:
            return
    raise AssertionError("health lists no plugin")


async def status(directory: Path) -> dict[str, Any]:
    code, out, errors = await asyncio.to_thread(muster, directory, "status", "--json")
    assert (code, errors) == (0, "")
    report: dict[str, Any] = orjson.loads(out)
    return report


async def until_firing(directory: Path, kinds: set[str]) -> dict[str, Any]:
    """Ask for the status until alerts of exactly these kinds fire; return it."""
    while True:
        # no pause is needed: each call takes a while
        report = await status(directory)
        if {alert["kind"] for alert in report["alerts"]} == kinds:
            return report


def test_a_node_that_fell_silent_is_shown_with_its_evidence_and_changes(tmp_path: Path) -> None:
    async def story() -> None:
        async with stack(tmp_path) as (link, health, url):
            await heartbeat_until_listed(link, tmp_path, "node.b")
            await link.publish(
                vocabulary.InventoryReported(
                    node="node.b",
                    at=datetime.now(UTC),
                    plugin=PLUGIN,
                    devices=(
                        vocabulary.Device(
                            id="g0", resource=GPU, health=Health.UNHEALTHY, reason="XID\x1b[31m 79"
                        ),
                    ),
                )
            )
            await link.publish(
                vocabulary.AllocationObserved(
                    node="node.b",
                    at=datetime.now(UTC),
                    plugin=PLUGIN,
                    resource=GPU,
                    device_ids=("g0",),
                    pod="team/training",
                )
            )
            report = await until_firing(tmp_path, {"device_unhealthy", "plugin_down"})
            assert report["health"] == health
            assert (report["plugins_total"], report["verdicts"]) == (1, {"PLUGIN_DOWN": 1})

            code, out, errors = await asyncio.to_thread(muster, tmp_path, "status")
            assert (code, errors) == (0, "")
            lines = out.splitlines()
            assert lines[0] == f"health    {health}"
            assert "plugins   1 on 1 node: 1 PLUGIN_DOWN" in lines
            assert "alerts    2 firing" in lines
            (row,) = [line for line in lines if line.startswith("node.b ")]
            counted = f"{GPU} 1 listed, unconfirmed; 1 faulty"
            assert row.endswith(f"{counted}  device_unhealthy, plugin_down")

            code, out, errors = await asyncio.to_thread(muster, tmp_path, "why", "node.b")
            assert (code, errors) == (0, "")
            assert f"node.b {PLUGIN} is PLUGIN_DOWN since " in out
            assert "(silent_and_nobody_listens)\n" in out
            nobody = (
                r"  evidence   at \d\d:\d\d:\d\d: probe: no process is subscribed to the plugin's "
            )
            assert re.search(nobody, out)
            wrong = f"  faulty     {GPU} g0: device_unhealthy: XID\N{REPLACEMENT CHARACTER}[31m 79"
            assert wrong in out
            assert f"{RUNBOOKS_URL}plugin_down.html\n" in out
            assert f"  team/training: got {GPU} g0 at " in out
            changes = [line[23:] for line in out.partition("latest changes")[2].splitlines()[1:]]
            fell = f"verdict {PLUGIN}: HEALTHY -> PLUGIN_DOWN (silent_and_nobody_listens) heartbeat"
            assert [change for change in changes if change.startswith(fell)]
            assert (
                f"alert firing critical plugin_down: {PLUGIN} (nvidia.com/gpu) on node.b is down"
                in changes
            )

            options = ("why", "node.b", "--json", "--health", f"{health}/state", "--url", url)
            code, out, errors = await asyncio.to_thread(muster, tmp_path, *options)
            assert (code, errors) == (0, "")
            view = orjson.loads(out)
            assert [plugin["verdict"] for plugin in view["plugins"]] == ["PLUGIN_DOWN"]
            assert [pod["pod"] for pod in view["pods"]] == ["team/training"]
            types = {change["type"] for change in view["changes"]}
            assert types == {
                "dev.muster.allocation.observed",
                "dev.muster.verdict.changed",
                "dev.muster.alert.changed",
            }

            code, out, errors = await asyncio.to_thread(muster, tmp_path, "why", "node.a")
            assert (code, out) == (2, "")
            expected = "muster why: no plugin and no event from node node.a; did you mean node.b?"
            assert errors == f"{expected}; according to health at {health}\n"

    asyncio.run(story())


def test_what_health_or_nats_has_is_shown_when_the_other_is_unavailable(tmp_path: Path) -> None:
    async def story() -> None:
        async with stack(tmp_path) as (link, health, url):
            await heartbeat_until_listed(link, tmp_path, "a")
            await until_firing(tmp_path, {"plugin_down"})
            no_bus = ("why", "a", "--url", "nats://127.0.0.1:1")
            code, out, errors = await asyncio.to_thread(muster, tmp_path, *no_bus)
            assert code == 1
            assert f"a {PLUGIN} is PLUGIN_DOWN since " in out
            assert "latest changes" not in out
            assert "muster why: NATS at nats://127.0.0.1:1 has not answered" in errors
            no_health = ("why", "a", "--url", url, "--health", "http://127.0.0.1:1")
            code, out, errors = await asyncio.to_thread(muster, tmp_path, *no_health)
            assert code == 1
            assert (
                f"alert firing critical plugin_down: {PLUGIN} (nvidia.com/gpu) on a is down" in out
            )
            assert errors == (
                "muster why: health does not answer: http://127.0.0.1:1/state: Connection refused\n"
            )
            environment = {"MUSTER_HEALTH_URL": health, "TMPDIR": str(tmp_path / "nats")}
            (code, out, _) = await asyncio.to_thread(muster, tmp_path, "status", **environment)
            assert (code, out.splitlines()[0]) == (0, f"health    {health}")

    asyncio.run(story())


def test_no_answer_is_one_line(tmp_path: Path) -> None:
    code, out, errors = muster(tmp_path, "status")
    assert (code, out) == (1, "")
    assert errors.startswith("muster status: no health service runs on this machine")
    assert errors.count("\n") == 1
    assert muster(tmp_path, "status", "--health", "http://127.0.0.1:1") == (
        1,
        "",
        "muster status: health does not answer: http://127.0.0.1:1/state: Connection refused\n",
    )


def test_a_bad_address_node_or_time_is_refused(tmp_path: Path) -> None:
    assert muster(tmp_path, "status", "--health", "health:8080") == (
        2,
        "",
        "muster status: 'health:8080' is not the address of a health service such as http://127.0.0.1:8080\n",
    )
    assert muster(tmp_path, "why", "Node_A") == (
        2,
        "",
        "muster why: node: 'Node_A' is not a Kubernetes node name\n",
    )
    assert muster(tmp_path, "why", "a", "--since", "soon") == (
        2,
        "",
        "muster why: 'soon' is neither an age such as 15m nor an ISO time\n",
    )


def test_a_command_that_cannot_write_its_output_ends_without_a_traceback(tmp_path: Path) -> None:
    def run(file: int, *arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        code, _, errors = muster_command.muster(*arguments, environment=environment, stdout=file)
        return code, errors

    async def story() -> None:
        async with stack(tmp_path) as (link, _, url):
            await heartbeat_until_listed(link, tmp_path, "node.b")
            await until_firing(tmp_path, {"plugin_down"})
            reading, closed_pipe = os.pipe()
            os.close(reading)
            full_disk = os.open("/dev/full", os.O_WRONLY)
            full = (1, "muster: standard output: No space left on device\n")
            keys = str(tmp_path / "keys")
            try:
                for file, outcome, arguments in (
                    (full_disk, full, ("status", "--json")),
                    (full_disk, full, ("why", "node.b")),
                    (full_disk, full, ("silence", "add", "node=a", "--comment", "x", "--url", url)),
                    (full_disk, full, ("dlq", "list", "--url", url)),
                    (full_disk, full, ("auth", "init", keys)),
                    (closed_pipe, (0, ""), ("status",)),
                    (
                        closed_pipe,
                        (0, ""),
                        ("events", "--no-follow", "--since", "1h", "--url", url),
                    ),
                    (closed_pipe, (0, ""), ("silence", "list", "--url", url)),
                    (closed_pipe, (0, ""), ("auth", "reader", "--name", "x", "--keys", keys)),
                ):
                    assert await asyncio.to_thread(run, file, *arguments) == outcome
            finally:
                os.close(closed_pipe)
                os.close(full_disk)

    asyncio.run(story())

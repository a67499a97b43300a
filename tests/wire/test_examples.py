"""The subscribers in examples/, in three languages: each prints stored and new alerts."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from muster import vocabulary
from muster.local import nats as local
from muster.nats import bus
from muster.nats.auth import permissions
from tests.worlds import shipped_nats

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"
USED: Final = ("state", "severity", "kind", "node", "summary")
LINES: Final = [
    r'firing critical stuck node-a "device-plugin on node-a is stuck\\\""',
    r'resolved critical stuck node-a "device-plugin on node-a is stuck\\\""',
]


def alert(state: vocabulary.AlertState) -> vocabulary.AlertChanged:
    """Return an alert whose summary has characters that must be escaped."""
    return vocabulary.AlertChanged(
        node="node-a",
        at=datetime.now(UTC),
        plugin="device-plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.CRITICAL,
        state=state,
        fingerprint="0123456789abcdef",
        summary='device-plugin on node-a is stuck\\"',
        starts_at=datetime.now(UTC),
    )


async def printed(command: Sequence[str], directory: Path) -> list[str]:
    """Return what a subscriber prints if it connects without credentials."""
    async with (
        asyncio.timeout(60),
        local.NatsServer(directory / "nats") as server,
        bus.Bus(server.url, producer="health", name="test", owner=True) as link,
    ):
        return await printed_by(command, link, {"NATS_URL": server.url})


async def printed_by(
    command: Sequence[str], link: bus.Bus, variables: Mapping[str, str]
) -> list[str]:
    """Publish an alert, run a subscriber, resolve the alert; return what the subscriber prints."""
    await link.publish(alert(vocabulary.AlertState.FIRING))
    environment = {key: value for key, value in os.environ.items() if key != "NATS_CREDS"}
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**environment, **variables},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        first = await process.stdout.readline()
        await link.publish(alert(vocabulary.AlertState.RESOLVED))
        second = await process.stdout.readline()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()
    return [line.decode().rstrip("\n") for line in (first, second)]


@pytest.fixture(params=["python", "shell", "go"])
def subscriber(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Return the command of a subscriber, in each of the languages."""
    if request.param == "python":
        return [sys.executable, str(EXAMPLES / "subscriber.py")]
    needed = ["go"] if request.param == "go" else ["nats", "jq"]
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    go = shutil.which("go")
    return [built(go, tmp_path)] if go and "go" in needed else [str(EXAMPLES / "subscriber.sh")]


def built(go: str, directory: Path) -> str:
    """Build the subscriber in Go without downloading modules; return the path of the program."""
    program = directory / "subscriber"
    result = subprocess.run(
        [go, "build", "-o", str(program), "."],
        cwd=EXAMPLES / "go",
        env={**os.environ, "GOPROXY": "off", "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "module lookup disabled" in result.stderr:
        pytest.skip("its modules are not downloaded: cd examples/go && go mod download")
    assert (result.returncode, result.stderr) == (0, "")
    return str(program)


def test_a_subscriber_prints_alerts(subscriber: list[str], tmp_path: Path) -> None:
    assert asyncio.run(printed(subscriber, tmp_path)) == LINES


def test_a_subscriber_works_as_a_reader(subscriber: list[str], tmp_path: Path) -> None:
    reader = {"NATS_DOMAIN": "muster", "NATS_INBOX_PREFIX": permissions.inbox("reader")}
    lines = list[str]()

    async def story(server: local.NatsServer) -> None:
        url = shipped_nats.address(server, "reader")
        async with bus.Bus(
            shipped_nats.address(server, "health"), producer="health", name="test"
        ) as link:
            lines.extend(await printed_by(subscriber, link, reader | {"NATS_URL": url}))

    shipped_nats.run(tmp_path, story)
    assert lines == LINES


@pytest.mark.parametrize("file", ["subscriber.py", "subscriber.sh", "go/subscriber.go"])
def test_what_a_subscriber_reads_is_in_the_published_schemas(file: str) -> None:
    program = (EXAMPLES / file).read_text()
    channels = json.loads((ROOT / "schemas/asyncapi.json").read_text())["channels"].values()
    subjects = {channel["address"].split(".{")[0] for channel in channels}
    assert set(re.findall(r"muster\.[a-z]+(?=\.>)", program)) <= subjects
    schema = json.loads((ROOT / "schemas/alert.changed.json").read_text())
    fields = schema["$defs"]["AlertChanged"]["properties"].keys()
    assert fields >= set(USED)
    assert all(name in program for name in USED)

"""The command line of a service, with a tiny service as a process."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

TINY: Final = """
import asyncio, sys
import msgspec
from muster.service import entry, logs, probes, runtime, sections

class Settings(msgspec.Struct, frozen=True, kw_only=True):
    http: sections.Http = sections.Http()
    period_s: sections.Period = 0.01
    story: str = ""

async def chatter(settings):
    while True:
        logs.logger().info("tick", odd="\\ud800", large=2**70, thing={1})
        await asyncio.sleep(settings.period_s)

async def serve(settings):
    logs.configure("tiny", node="node-a")
    match settings.story:
        case "cannot": raise entry.CannotStart("watch /nowhere: no such directory; create it")
        case "bug": raise RuntimeError("broken invariant")
    http = settings.http
    async with probes.serve(http.host, http.port, ready=lambda: None) as url:
        logs.logger().info("listening", http=url)
        await runtime.run(chatter(settings))
    logs.logger().info("ended")

if __name__ == "__main__":
    sys.exit(entry.main("tiny", Settings, serve))
"""
CHATTY: Final = {"MUSTER_TINY__PERIOD_S": "0.001"}


@asynccontextmanager
async def tiny(
    tmp_path: Path,
    *arguments: str,
    stdout: int = asyncio.subprocess.PIPE,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[asyncio.subprocess.Process]:
    program = tmp_path / "tiny.py"
    program.write_text(TINY)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(program), *arguments),
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def run(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Run the service until it ends by itself; return exit code, stdout and stderr."""

    async def played() -> tuple[int | None, str, str]:
        async with tiny(tmp_path, *arguments, environment=environment) as process:
            out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    return asyncio.run(played())


async def address(process: asyncio.subprocess.Process) -> tuple[str, int]:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        line_fields = json.loads(line)
        if line_fields["event"] == "listening":
            host, _, port = line_fields["http"].removeprefix("http://").partition(":")
            return host, int(port)
    raise AssertionError("ended before it listened")


async def status(place: tuple[str, int], path: str) -> int:
    reader, writer = await asyncio.open_connection(*place)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    head = await reader.readline()
    await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1])


def test_check_prints_the_settings_in_force_and_ends(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("period_s: 2\n")
    code, out, err = run(tmp_path, "--check", "--config", str(file), MUSTER_TINY__HTTP__PORT="8080")
    assert (code, err) == (0, "")
    assert out == "http:\n  host: 127.0.0.1\n  port: 8080\nperiod_s: 2.0\nstory: ''\n"


def test_each_invalid_setting_is_one_line_and_the_exit_code_is_2(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("period: 2\nhttp: {port: 70000}\n")
    assert run(tmp_path, "--config", str(file), MUSTER_TINY__STORY="7") == (
        2,
        "",
        (
            f"muster-tiny: {file}: period: unknown key (value 2); did you mean period_s?\n"
            f"muster-tiny: {file}: http.port: expected a whole number of at most 65535, "
            "found 70000\n"
            "muster-tiny: MUSTER_TINY__STORY: story: expected a string, found 7\n"
        ),
    )


def test_a_missing_file_ends_with_2(tmp_path: Path) -> None:
    assert run(tmp_path, "--config", "absent.yaml") == (
        2,
        "",
        "muster-tiny: absent.yaml: No such file or directory\n",
    )


def test_what_prevents_the_start_is_reported_in_one_line(tmp_path: Path) -> None:
    assert run(tmp_path, MUSTER_TINY__STORY="cannot") == (
        2,
        "",
        "muster-tiny: watch /nowhere: no such directory; create it\n",
    )


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(tmp_path, MUSTER_TINY__HTTP__PORT=str(port))
    assert (code, out) == (2, "")
    assert err.startswith("muster-tiny: ")
    assert f"127.0.0.1:{port}: Address already in use" in err
    assert err.count("\n") == 1


def test_a_bug_ends_with_its_traceback(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, MUSTER_TINY__STORY="bug")
    assert (code, out) == (1, "")
    assert err.endswith("RuntimeError: broken invariant\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    async def story() -> None:
        async with tiny(tmp_path) as process:
            assert await status(await address(process), "/healthz") == 200
            process.send_signal(number)
            out, err = await process.communicate()
            assert (process.returncode, err) == (0, b"")
            assert json.loads(out.splitlines()[-1])["event"] == "ended"

    asyncio.run(story())


def test_a_line_of_the_log_is_one_json_object_whatever_is_in_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with tiny(tmp_path) as process:
            await address(process)
            assert process.stdout is not None
            line_fields = json.loads(await process.stdout.readline())
        assert line_fields.pop("timestamp").endswith("Z")
        assert line_fields == {
            "event": "tick",
            "level": "info",
            "service": "tiny",
            "node": "node-a",
            "odd": "\ud800",
            "large": 2**70,
            "thing": "{1}",
        }

    asyncio.run(story())


def test_a_service_outlives_the_reader_of_its_log(tmp_path: Path) -> None:
    async def story() -> None:
        reading, writing = os.pipe()
        async with tiny(tmp_path, stdout=writing, environment=CHATTY) as process:
            os.close(writing)
            with os.fdopen(reading, "rb", buffering=0) as log:
                text = b""
                while b"\n" not in text:
                    text += await asyncio.to_thread(log.read, 4096)
            url = json.loads(text.splitlines()[0])["http"]
            host, _, port = url.removeprefix("http://").partition(":")
            while not await lost_lines(host, int(port)):
                pass
            assert await status((host, int(port)), "/healthz") == 200
            process.terminate()
            _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")

    asyncio.run(story())


async def lost_lines(host: str, port: int) -> float:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    body = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    lines = [line for line in body.splitlines() if line.startswith("muster_log_lines_lost_total")]
    return float(lines[0].split()[1])

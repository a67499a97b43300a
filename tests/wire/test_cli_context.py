"""`muster --context`: commands that connect to a cluster's services, with the user's rights."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from muster import vocabulary
from tests.worlds import console_fleet, muster_in_cluster
from tests.worlds.muster_in_cluster import environment, muster, rights

CONTEXT: Final = ("--context", "muster")
_REFUSED: Final = re.compile(
    r"muster silence: NATS at \S+ has not answered for 3 s: "
    r'nats: permissions violation for publish to "\S+"'
)
EVENT: Final = vocabulary.PluginStopping(
    node="node-a",
    plugin="device-plugin",
    at=datetime.now(UTC),
    reason=vocabulary.StopReason.UPGRADE,
)


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(240):
            await story()

    asyncio.run(limited())


def test_the_option_stands_before_or_after_the_command_and_the_leader_is_asked(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with (
            muster_in_cluster.empty(tmp_path) as world,
            muster_in_cluster.health(world, 0, leader="muster-health-1"),
            muster_in_cluster.health(world, 1),
        ):
            before, after = await asyncio.gather(
                muster(world, *CONTEXT, "status", "--json"),
                muster(world, "status", "--json", *CONTEXT),
            )
            # without NATS, only silences are unknown
            absent = "no pod of muster-nats is in the namespace muster"
            unknown = f"which alerts are silenced is unknown: {absent}"
            for code, out, errors in (before, after):
                assert (code, errors) == (0, [f"{rights(world, 'status')}; {unknown}"])
                report = orjson.loads(out)
                assert (report["plugins_total"], report["service"]["leads"]) == (1, 7)

    play(story)


def test_passwords_of_the_role_that_a_command_needs_come_from_the_secret(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            muster_in_cluster.empty(tmp_path) as world,
            muster_in_cluster.health(world, 0),
            muster_in_cluster.passwords(world, tmp_path) as url,
            muster_in_cluster.connected(url) as link,
        ):
            await link.publish(EVENT)
            reader = "reader with Secret muster-nats-reader"
            admin = "admin with Secret muster-nats-admin"
            events = ("events", "--since", "1h", "--no-follow", "--json")
            silence = ("silence", "add", "node=node-a", "--comment", "x", "--author", "y")
            (code, out, errors), node, added = await asyncio.gather(
                muster(world, *CONTEXT, *events),
                muster(world, *CONTEXT, "why", "node-a", "--json"),
                muster(world, *CONTEXT, *silence),
            )
            assert (code, errors) == (0, [rights(world, "events", reader)])
            assert orjson.loads(out)["data"]["reason"] == "upgrade"
            assert (node[0], node[2]) == (0, [rights(world, "why", reader)])
            assert (added[0], added[2]) == (0, [rights(world, "silence", admin)])
            code, out, errors = await muster(world, *CONTEXT, "silence", "list", "--json")
            assert (code, errors) == (0, [rights(world, "silence", admin)])
            assert orjson.loads(out)["id"] == added[1].strip()

    play(story)


def test_a_reader_sees_which_alerts_are_silenced_and_hears_why_it_cannot_silence_any(
    tmp_path: Path,
) -> None:
    alert = console_fleet.alert("node-a")

    async def story() -> None:
        async with (
            muster_in_cluster.empty(tmp_path) as world,
            muster_in_cluster.health(world, 0, firing=[alert]),
            muster_in_cluster.passwords(world, tmp_path) as url,
            muster_in_cluster.connected(url),
        ):
            silence = ("silence", "add", "node=node-a", "--comment", "x", "--author", "ann")
            assert (await muster(world, *CONTEXT, *silence))[0] == 0
            code, out, errors = await muster(world, *CONTEXT, "status")
            reader = "reader with Secret muster-nats-reader"
            assert (code, errors) == (0, [rights(world, "status", reader)])
            assert "1 firing, 1 silenced" in out
            assert "[silenced by ann until " in out
            as_reader = url.replace("//admin:", "//reader:")
            line = ""
            # on a busy machine, the command may not reach NATS within its 3 s
            while not _REFUSED.fullmatch(line):
                code, _, (line,) = await muster(world, *silence, "--url", as_reader)
                assert code == 1

    play(story)


def test_with_tls_the_credentials_are_a_secrets_or_the_users_own(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            muster_in_cluster.empty(tmp_path) as world,
            muster_in_cluster.credentials(world, tmp_path) as creds,
        ):
            events = (*CONTEXT, "events", "--since", "1h", "--no-follow")
            code, _, errors = await muster(world, *events)
            assert (code, errors) == (
                1,
                [
                    (
                        "muster events: NATS needs credentials, and the namespace muster has no "
                        "Secret muster-reader-creds: set NATS_CREDS to a file of your own (muster "
                        "auth reader --name NAME --out FILE)"
                    )
                ],
            )
            own = tmp_path / "own.creds"
            own.write_text(creds["reader"])
            code, _, errors = await muster(world, *events, NATS_CREDS=str(own))
            # this NATS has no stream
            assert (code, errors[0]) == (
                1,
                rights(world, "events", f"reader with $NATS_CREDS ({own})"),
            )
            assert errors[1].endswith("has no stream MUSTER_ALERTS, which health creates")
            await world.secret("muster-reader-creds", "nats.creds", creds["reader"])
            code, _, errors = await muster(world, *events)
            assert (code, errors[0]) == (
                1,
                rights(world, "events", "reader with Secret muster-reader-creds"),
            )
            assert errors[1].endswith("has no stream MUSTER_ALERTS, which health creates")

    play(story)


@pytest.mark.parametrize(
    ("verb", "resource", "missing"),
    [
        ("list", "pods", "list pods in the namespace muster"),
        ("get", "pods/portforward", "get pods/portforward in the namespace muster"),
        ("create", "pods/portforward", "create pods/portforward in the namespace muster"),
        ("get", "secrets", "get the Secret muster-nats-reader in the namespace muster"),
    ],
)
def test_a_missing_right_is_named(verb: str, resource: str, missing: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with muster_in_cluster.empty(tmp_path) as world:
            await world.pod("muster-nats", 0, 4222, "nats://127.0.0.1:1")
            world.deny(verb, resource)
            code, out, (error,) = await muster(world, *CONTEXT, "events")
            assert (code, out) == (1, "")
            assert error.startswith(f"muster events: missing permission: {missing} (")

    play(story)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with muster_in_cluster.empty(tmp_path) as world:

            async def refused(*arguments: str) -> str:
                code, out, (error,) = await muster(world, *arguments)
                assert (code, out) == (1, "")
                return error.partition(": ")[2]

            here, there, unknown = await asyncio.gather(
                refused(*CONTEXT, "status"),
                refused(*CONTEXT, "--namespace", "tools", "status"),
                refused("--context", "other", "status"),
            )
            absent = "no pod of muster is in the namespace {}; name another with --namespace"
            assert (here, there) == (absent.format("muster"), absent.format("tools"))
            assert "Expected object with name other in" in unknown
            await world.pod("muster-nats", 0, 4222, "nats://127.0.0.1:1")
            assert await refused(*CONTEXT, "status") == (
                "no pod of muster-health is in the namespace muster"
            )
            await world.secret("muster-nats-reader", "password", "with a line feed\n")
            assert await refused(*CONTEXT, "events") == (
                "Secret muster-nats-reader: password is damaged: it is a number, or has a "
                "character that cannot be part of an address, such as a line feed; correct it, "
                "or make it again as docs/security.md says"
            )
            waiting = {"phase": "Pending", "conditions": []}
            await world.status("muster-nats-0", waiting)
            assert await refused(*CONTEXT, "events") == (
                "no pod of muster-nats is ready in the namespace muster: muster-nats-0 (Pending)"
            )

    play(story)


def test_nothing_is_opened_for_what_an_option_has_the_address_of(tmp_path: Path) -> None:
    async def story() -> None:
        async with muster_in_cluster.empty(tmp_path) as world:
            address = ("--url", "nats://127.0.0.1:1")
            code, out, errors = await muster(world, *CONTEXT, "events", *address)
            assert (code, out, errors) == (
                2,
                "",
                ["muster events: --context: cannot be used if all addresses are set"],
            )

    play(story)


def test_ctrl_c_ends_the_connections(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            muster_in_cluster.empty(tmp_path) as world,
            muster_in_cluster.passwords(world, tmp_path) as url,
            muster_in_cluster.connected(url) as link,
        ):
            await link.publish(EVENT)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "muster.cli", *CONTEXT, "events", "--since", "1h",
                env=environment(world), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None
            assert "plugin.stopping" in (await process.stdout.readline()).decode()
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
            assert process.returncode == 0
            assert errors.decode().splitlines() == [
                rights(world, "events", "reader with Secret muster-nats-reader")
            ]

    play(story)

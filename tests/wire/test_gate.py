"""The gate of a real nats-server with the shipped configuration: who is admitted to what."""

import asyncio
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats.errors
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.cli import keyfiles
from muster.nats import connection
from muster.nats.auth import accounts, nkeys
from tests.worlds import bus_subjects, nats_with_gate, plugin_process, token_issuer


def run(
    world: nats_with_gate.World, story: Callable[[nats_with_gate.World], Awaitable[None]]
) -> None:
    async def whole() -> None:
        async with asyncio.timeout(100), world:
            await story(world)

    asyncio.run(whole())


async def is_refused(world: nats_with_gate.World, token: str, **options: str) -> bool:
    try:
        async with world.plugin(token, **options):
            return False
    except (nats.errors.Error, TimeoutError, OSError):
        return True


def test_a_token_allows_to_publish_and_receive_for_its_node_only(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        world = nats_with_gate.World(tmp_path, pace={"burst": 1000})
        runner.run(world.__aenter__())

        @settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
        @given(
            st.lists(bus_subjects.SUBJECTS, min_size=20, max_size=60),
            st.lists(
                bus_subjects.SUBJECTS.filter(bus_subjects.is_filter), min_size=10, max_size=60
            ),
        )
        def holds(published: list[str], received: list[str]) -> None:
            runner.run(story(published, received))

        async def story(published: list[str], received: list[str]) -> None:
            token = nats_with_gate.token()
            async with asyncio.timeout(100), world.admin() as admin:
                async with world.plugin(token) as plugin:
                    await bus_subjects.check_publishing(published, hearing=admin, plugin=plugin)
                async with world.admin() as other, world.plugin(token) as plugin:
                    await bus_subjects.check_subscribing(received, speaker=other, plugin=plugin)

        try:
            holds()
        finally:
            runner.run(world.__aexit__(None, None, None))


def test_a_compromised_plugin_can_alter_read_and_flood_nothing(tmp_path: Path) -> None:
    async def story(world: nats_with_gate.World) -> None:
        async with world.admin() as admin:
            await admin.raw.jetstream().add_stream(
                name="MUSTER_EVENTS", subjects=["muster.event.>"]
            )
            await admin.raw.jetstream().publish(
                "muster.event.node-b.device-plugin.device.added", b"of another"
            )
            async with world.admin() as hearing, world.plugin(nats_with_gate.token()) as plugin:
                await bus_subjects.check_replies(hearing=hearing, plugin=plugin)
            before = await admin.raw.jetstream().stream_info("MUSTER_EVENTS")
            await floods(world)
            after = await admin.raw.jetstream().stream_info("MUSTER_EVENTS")
            assert after.state.messages == before.state.messages

    async def floods(world: nats_with_gate.World) -> None:
        async with world.plugin(nats_with_gate.token("node-a")) as plugin:
            reads = [f"$JS.API.DIRECT.GET.MUSTER_EVENTS.muster.event.node-b.{x}" for x in "ab"]
            reads += [
                "$JS.API.STREAM.MSG.GET.MUSTER_EVENTS",
                "$JS.API.CONSUMER.CREATE.MUSTER_EVENTS",
            ]
            for subject in (*bus_subjects.WRITES, *reads):
                await plugin.raw.publish(subject, b"{}", reply="_INBOX.plugin_node-a.x")
            await plugin.flush()
            await bus_subjects.until(
                lambda: len(plugin.refused) == len(bus_subjects.WRITES) + len(reads)
            )
        await bus_subjects.check_limits(lambda: world.plugin(nats_with_gate.token("node-a")))
        async with contextlib.AsyncExitStack() as many:
            for _ in range(4):
                await many.enter_async_context(world.plugin(nats_with_gate.token("node-a")))
            assert await is_refused(world, nats_with_gate.token("node-a"))
            assert not await is_refused(world, nats_with_gate.token("node-b"))
        assert await is_refused(world, nats_with_gate.token("node-c"), name="device-plugin node-b")
        assert (await world.counted()).items() >= {"too_often": 1, "name": 1}.items()

    run(nats_with_gate.World(tmp_path, pace={"burst": 8, "per_minute": 0.1}), story)


def test_wrong_tokens_are_refused_logged_and_counted(tmp_path: Path) -> None:
    async def story(world: nats_with_gate.World) -> None:
        now = time.time()
        wrong = {
            "unknown_key": nats_with_gate.token(key="k3"),
            "algorithm": token_issuer.token(
                token_issuer.claims("node-a", at=now), algorithm="none"
            ),
            "expired": token_issuer.token(token_issuer.claims("node-a", at=now - 7200)),
            "not_yet": token_issuer.token(token_issuer.claims("node-a", at=now + 600)),
            "audience": nats_with_gate.token(aud=["https://kubernetes.default.svc"]),
            "issuer": nats_with_gate.token(iss="https://elsewhere"),
            "account": nats_with_gate.token(sub="system:serviceaccount:muster:muster-health"),
            "malformed": f"{nkeys.to_base64(b'[' * 2300)}.e30.e30",
            "signature": token_issuer.token(token_issuer.claims("node-a", at=now), "k2", kid="k1"),
        }
        refused = await asyncio.gather(*(is_refused(world, token) for token in wrong.values()))
        assert all(refused)
        assert await is_refused(world, "")
        # a client may have given up before the gate answered
        while sum((await world.counted()).values()) <= len(wrong):
            await asyncio.sleep(0.05)
        assert await world.counted() == {**dict.fromkeys(wrong, 1), "no_token": 1}
        reasons = [line["reason"] for line in world.logged("connection_denied")]
        assert sorted(reasons) == sorted([*wrong, "no_token"])
        text = b"".join(gate.log.read_bytes() for gate in world.gates).decode()
        assert not any(token in text for token in wrong.values())
        dotted = nats_with_gate.token("ip-10-0-0-1.eu.internal")
        async with world.plugin(dotted) as token, world.admin() as admin:
            await admin.raw.subscribe("muster.event.>", cb=received.put)
            await admin.flush()
            await token.raw.publish("muster.event.ip-10-0-0-1_eu_internal.other.device.added", b"")
            await token.raw.publish("muster.event.ip-10-0-0-1.eu.internal.plugin", b"")
            await token.flush()
            await bus_subjects.until(lambda: len(token.refused) == 1)
            assert (
                await received.get()
            ).subject == "muster.event.ip-10-0-0-1_eu_internal.other.device.added"

        await with_the_old_key(world)

    async def with_the_old_key(world: nats_with_gate.World) -> None:
        """Break and restore the signing key: each is logged once, and clients are admitted."""
        file = world.keys / "gate.json"
        good = file.read_bytes()
        file.write_bytes(b"{")
        await bus_subjects.until(lambda: bool(world.logged("signing_key_unusable")))
        asked = world.cluster.asked
        await bus_subjects.until(lambda: world.cluster.asked > asked + 1)
        assert not await is_refused(world, nats_with_gate.token())
        file.write_bytes(good)
        await bus_subjects.until(lambda: bool(world.logged("signing_key_restored")))
        assert len(world.logged("signing_key_unusable")) == 1

    received: asyncio.Queue[connection.Message] = asyncio.Queue()
    run(nats_with_gate.World(tmp_path, plugins=["other"]), story)


async def hangs(world: nats_with_gate.World) -> None:
    """Let the cluster answer byte by byte: it counts as unavailable, and SIGTERM ends the gate."""

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)

    port = int(world.cluster.url.rpartition(":")[2])
    async with await asyncio.start_server(drip, "127.0.0.1", port):
        gate = world.gates[1]
        await gate.start()
        await bus_subjects.until(lambda: bool(world.logged("token_keys_unavailable")))
        assert (
            "no complete answer within 2 s" in world.logged("token_keys_unavailable")[-1]["error"]
        )
        async with asyncio.timeout(30):
            await gate.end()


def test_gates_may_die_and_the_cluster_may_change_its_keys_or_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("NATS_TOKEN_FILE", str(file))

    async def story(world: nats_with_gate.World) -> None:
        file.write_text(nats_with_gate.token("node-b"))
        async with world.plugin(nats_with_gate.token()) as old:
            await world.gates[0].kill()
            answers = [is_refused(world, nats_with_gate.token()) for _ in range(4)]
            assert await asyncio.gather(*answers) == [False] * 4
            await world.gates[1].kill()
            async with connection.Connection(world.server.url, name="device-plugin node-b") as link:
                assert await is_refused(world, nats_with_gate.token())
                # a client that is connected does not need the gates
                await old.raw.publish("muster.event.node-a.device-plugin.device.added", b"")
                await old.flush()
                assert not link.is_connected
                await world.cluster.go()
                await hangs(world)
                await world.gates[0].start()
                # the gate has kept the keys, and the refused client connects again
                await link.client()
                assert await is_refused(world, nats_with_gate.token(key="k2"))
                world.cluster.keys = [token_issuer.jwk("k2", "RS256")]
                await world.cluster.come()
                await rotated(world)
                await renewed(link)
            assert not old.refused
            assert old.raw.is_connected

    async def rotated(world: nats_with_gate.World) -> None:
        async with asyncio.timeout(30):
            while await is_refused(world, nats_with_gate.token(key="k2")):
                await asyncio.sleep(0.05)
        assert await is_refused(world, nats_with_gate.token(key="k1"))

    async def renewed(link: connection.Connection) -> None:
        """Let a short-lived token expire after another one was written to its file."""
        epoch = link.epoch
        live = link.live_client()
        assert live is not None
        file.write_text(nats_with_gate.token("node-b", "k2", lasts_s=2))
        await live.force_reconnect()
        await bus_subjects.until(lambda: link.epoch == epoch + 1 and link.is_connected)
        file.write_text(nats_with_gate.token("node-b", "k2"))
        await bus_subjects.until(lambda: link.epoch == epoch + 2, limit_s=30)
        assert link.is_connected

    run(nats_with_gate.World(tmp_path, gates=2), story)


def test_credentials_work_without_a_gate_until_their_key_is_changed(tmp_path: Path) -> None:
    async def story(world: nats_with_gate.World) -> None:
        now = time.time()

        def made(role: accounts.Role, name: str, until: float | None = None) -> str:
            return keyfiles.user(world.keys, role, name=name, at=time.time(), until=until)

        of_a = made(accounts.Role.NODE, "plugin_node-a")
        reader = made(accounts.Role.READER, "reader_grafana")
        async with (
            world.admin() as admin,
            world.holder(of_a) as plugin,
            world.holder(reader) as grafana,
            world.holder(made(accounts.Role.READER, "reader_short", until=time.time() + 3)) as ends,
        ):
            published = [
                "muster.event.node-b.device-plugin.device.added",
                "muster.event.node-a.device-plugin.device.added",
                *bus_subjects.WRITES,
            ]
            await bus_subjects.check_publishing(published, hearing=admin, plugin=plugin)
            for subject in bus_subjects.WRITES:
                await grafana.raw.publish(subject, b"{}")
            await grafana.raw.subscribe("muster.heartbeat.>")
            await grafana.raw.subscribe("_INBOX.reader_other.>")
            await grafana.flush()
            await bus_subjects.until(lambda: len(grafana.refused) == len(bus_subjects.WRITES) + 1)
            keyfiles.rotate(world.keys, "node", at=now)
            keyfiles.rotate(world.keys, "reader", at=now)
            world.reload()
            new = made(accounts.Role.READER, "reader_grafana")
            async with asyncio.timeout(100):
                for credentials in (new, reader):
                    while not await comes(world, credentials):
                        await asyncio.sleep(0.02)
            await bus_subjects.until(lambda: ends.raw.is_closed)
            keyfiles.drop(world.keys, "reader", at=now)
            world.reload()
            # a client that was admitted by the old key is disconnected
            await bus_subjects.until(lambda: grafana.raw.is_closed)
            assert not await comes(world, reader)
            assert await comes(world, new)
            assert await comes(world, of_a)
            assert not plugin.raw.is_closed

    async def comes(world: nats_with_gate.World, text: str) -> bool:
        try:
            async with world.holder(text):
                return True
        except (nats.errors.Error, OSError):
            return False

    run(nats_with_gate.World(tmp_path, gates=0), story)


def test_the_plugin_itself_connects_with_its_token_and_loads_nothing_for_it(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(prefix="mu-"))
    (root / "device-plugins").mkdir()
    file, config = tmp_path / "token", tmp_path / "plugin.yaml"
    plugin_process.written(config, plugin_process.resource("example.com/null", "/dev/null"))

    async def story(world: nats_with_gate.World) -> None:
        file.write_text(nats_with_gate.token())
        heard: asyncio.Queue[connection.Message] = asyncio.Queue()
        async with world.admin() as admin:
            await admin.raw.jetstream().add_stream(name="E", subjects=["muster.event.>"])
            await admin.raw.subscribe("muster.event.>", cb=heard.put)
            await admin.flush()
            url = {"MUSTER_PLUGIN__BUS__URL": world.server.url, "NATS_TOKEN_FILE": str(file)}
            async with plugin_process.plugin(root, config, **url) as plugin:
                subject = (await heard.get()).subject
                assert subject == "muster.event.node-a.device-plugin.plugin.started"
                maps = Path(f"/proc/{plugin.process.pid}/maps").read_text()
                assert "cryptography" not in maps
        assert (await world.counted())["admitted"] == 1

    try:
        run(nats_with_gate.World(tmp_path), story)
    finally:
        shutil.rmtree(root)


def test_a_mistake_gets_one_line_and_exit_code_2_and_sigterm_ends_it_in_order(
    tmp_path: Path,
) -> None:
    keyfiles.make(tmp_path / "keys", at=time.time())
    (tmp_path / "bad.json").write_text('{"node_seed": "SECRET"}')
    good = {"MUSTER_GATE__SIGNING": f"{tmp_path}/keys/gate.json"}
    base = {
        "MUSTER_GATE__BUS__URL": "nats://127.0.0.1:1",
        "MUSTER_GATE__KEYS__API": "http://[::1]",
    }
    mistakes = {
        "signing: /etc/muster-gate/gate.json: No such file": base,
        "signing: .*: not a file that `muster auth init` wrote": base
        | {"MUSTER_GATE__SIGNING": f"{tmp_path}/bad.json"},
        "keys: not running in a cluster; set keys.file or keys.api": good,
        "tokens.issuer: must be set with keys.file": good | {"MUSTER_GATE__KEYS__FILE": "/x"},
    }

    async def run_one(environment: dict[str, str]) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "muster_gate"),
            env=os.environ | environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if b"listening" in line:
                process.terminate()
                break
        _, errors = await process.communicate()
        return process.returncode, errors.decode()

    async def story() -> None:
        async with asyncio.timeout(100):
            ends = await asyncio.gather(*map(run_one, [*mistakes.values(), {**base, **good}]))
        assert ends.pop() == (0, "")
        for (code, output), expected in zip(ends, mistakes, strict=True):
            assert (code, output.count("\n")) == (2, 1)
            assert re.search(expected, output), output
            assert "SECRET" not in output

    asyncio.run(story())

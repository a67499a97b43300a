"""`muster doctor` in a cluster, and outside one with only the address of NATS."""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson
import prometheus_client
import pytest

import muster
from muster import vocabulary
from muster.cli import registry
from muster.nats import bus, leader_lock, storage, streams
from muster.service import probes
from tests.worlds import manifests, muster_command, muster_in_cluster, nats_with_passwords
from tests.worlds.muster_in_cluster import World

UNSET: Final = {"NATS_URL", "NATS_CREDS", "NATS_CA", "MUSTER_HEALTH_URL", "http_proxy"}
AT: Final = datetime.now(UTC)
Findings = dict[str, tuple[str, str]]


async def doctor(where: Path, *arguments: str, **more: str) -> tuple[int, Findings, str]:
    """Run the command so that it finds no `muster up`; return exit code, findings and errors."""
    inherited = {key: value for key, value in os.environ.items() if key not in UNSET}
    code, out, errors = await asyncio.to_thread(
        muster_command.muster,
        *("doctor", "--json", *arguments),
        environment={**inherited, "TMPDIR": str(where), **more},
    )
    report: dict[str, Any] = orjson.loads(out) if out else {"findings": []}
    findings = {each["check"]: (each["level"], each["text"]) for each in report["findings"]}
    assert report.get("exit_code", code) == code
    return code, findings, errors


async def in_cluster(world: World, *arguments: str) -> tuple[int, Findings, str]:
    where = world.kubeconfig.parent
    options = ("--context", "muster", "--within", "2m")
    # the addresses of another installation, which must not be used
    elsewhere = {"NATS_URL": "nats://127.0.0.1:1", "MUSTER_HEALTH_URL": "http://127.0.0.1:1"}
    kubeconfig = str(world.kubeconfig)
    return await doctor(where, *options, *arguments, KUBECONFIG=kubeconfig, **elsewhere)


@contextlib.asynccontextmanager
async def complete(where: Path) -> AsyncIterator[tuple[World, bus.Bus]]:
    """Run a cluster in which muster has no problem, except that nothing consumes alerts."""
    async with (
        asyncio.timeout(100),
        muster_in_cluster.empty(where) as world,
        muster_in_cluster.health(world, 0),
        muster_in_cluster.passwords(world, where) as url,
        muster_in_cluster.connected(url) as link,
        served(world, "muster-notifier"),
    ):
        await world.pod("muster-plugin", 0, 8080, "nats://127.0.0.1:1")
        for bucket, service in ((streams.LEADER, "health"), (streams.TENURE, "notifier")):
            key = leader_lock.Key(link.link, bucket, service)
            claim = orjson.dumps({"name": "x", "host": f"{service}-pod", "space": "", "pid": 1})
            await key.claim(claim, ttl_s=60, revision=0, timeout_s=10)
        receivers = {"ops": "slack", "console": "console"}
        await link.publish(
            vocabulary.ReceiversConfigured(
                node=vocabulary.FLEET, at=AT, receivers=receivers, interval_s=60
            )
        )
        yield world, link


@contextlib.asynccontextmanager
async def served(world: World, part: str, number: int = 0) -> AsyncIterator[None]:
    """Run a pod whose metrics have its version and when it became the leader."""
    registry = prometheus_client.CollectorRegistry()
    build = prometheus_client.Gauge("muster_build_info", "x", ["version"], registry=registry)
    build.labels("0.0.1").set(1)
    leads = "muster_leader_since_timestamp_seconds"
    prometheus_client.Gauge(leads, "x", registry=registry).set(1_700_000_000)
    async with probes.serve(
        "127.0.0.1", 0, ready=probes.always, registry=registry
    ) as url:  # fmt: skip
        await world.pod(part, number, 8080, url)
        yield


def test_in_a_cluster_everything_is_looked_at(tmp_path: Path) -> None:
    async def story() -> None:
        async with complete(tmp_path) as (world, link):
            await link.publish(
                vocabulary.ConfigurationRefused(
                    node="node-a", plugin="p", at=AT, config_hash="1", problems=("unknown field",)
                )
            )
            for node in ("node-b", "node-c"):
                refused = vocabulary.ConfigurationRefused(
                    node=node, plugin="p", at=AT, config_hash="1", problems=("unknown field",)
                )
                await link.publish(refused)
            await link.publish(
                vocabulary.ConfigurationApplied(node="node-b", plugin="p", at=AT, config_hash="2")
            )
            url = link.link._url
            async with bus.Bus(url, producer="plugins/p", name="p") as again:
                await again.publish(
                    vocabulary.PluginStarted(
                        node="node-c", plugin="p", at=AT, version="1", instance=again.instance
                    )
                )
            code, findings, errors = await in_cluster(world)
            assert (code, errors) == (1, "")
            trip = findings["bus"][1].rpartition(";")[2]
            assert findings == {
                "pods": (
                    "OK",
                    "all 4 are ready (health 1, nats 1, notifier 1, plugin 1); 0 restarts",
                ),
                "images": ("OK", findings["images"][1]),
                "bus": (
                    "OK",
                    (
                        "nats-server 2.15.1; NATS as admin with Secret muster-nats-admin, "
                        f"as alice;{trip}"
                    ),
                ),
                "streams": ("OK", findings["streams"][1]),
                "consumers": ("FAIL", "MUSTER_ALERTS has no consumer: no notifier runs"),
                "dead letters": ("OK", "none"),
                "leaders": (
                    "OK",
                    (
                        "health: health-pod (process 1); notifier: notifier-pod (process 1) since "
                        "2023-11-14 22:13 UTC"
                    ),
                ),
                "health": ("OK", "it answers; 0 alerts firing"),
                "plugins": ("OK", "1 on 1 node, all well"),
                "versions": (
                    "WARN",
                    f"0.0.1: muster-notifier-0; this command: {muster.__version__}",
                ),
                "certificates": ("OK", "none: NATS is used without TLS"),
                "receivers": ("OK", "ops (slack)"),
                "configuration": ("WARN", "node-a p: unknown field"),
            }

    asyncio.run(story())


def test_each_of_many_services_is_asked_for_its_version(tmp_path: Path) -> None:
    file = tmp_path / "bundle.tar.gz"
    names = {f"muster-{part}-{n}" for part in ("gate", "labeler") for n in range(4)}

    async def story() -> None:
        async with complete(tmp_path) as (world, _), contextlib.AsyncExitStack() as stack:
            for name in names:
                part, _, number = name.rpartition("-")
                await stack.enter_async_context(served(world, part, int(number)))
            await in_cluster(world, "--bundle", str(file))

    asyncio.run(story())
    content = muster_in_cluster.unpacked(file)["muster-doctor/versions.json"]
    assert orjson.loads(content)["processes"].keys() == {*names, "muster-notifier-0"}


def test_what_a_right_is_missing_for_is_named_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    async def story() -> None:
        async with complete(tmp_path) as (world, _):
            path = "/api/v1/namespaces/muster/secrets/muster-nats-admin"
            await world.api.request("DELETE", path, timeout_s=10)
            code, as_reader, errors = await in_cluster(world)
            assert (code, errors) == (2, "")
            await world.secret("muster-nats-admin", "password", "")
            code_damaged, damaged, _ = await in_cluster(world)
            assert code_damaged == 2
            world.deny("get", "secrets")
            code_without, without, _ = await in_cluster(world)
            assert code_without == 2
            world.deny("list", "pods")
            code_blind, blind, _ = await in_cluster(world)
            assert (code_blind, {level for level, _ in blind.values()}) == (2, {"NOT CHECKED"})
        assert as_reader["bus"][1].startswith(
            "nats-server 2.15.1; NATS as reader with Secret muster-nats-reader, as alice;"
        )
        level, why = as_reader["streams"]
        assert level == "NOT CHECKED"
        assert why.startswith(f"get {path}: HTTP 404 ")
        assert as_reader["consumers"] == as_reader["leaders"] == (level, why)
        assert (as_reader["receivers"], as_reader["configuration"][0]) == (
            ("OK", "ops (slack)"),
            "OK",
        )
        assert damaged["streams"] == (
            "NOT CHECKED",
            (
                "Secret muster-nats-admin: password is damaged: missing or empty; correct it, or "
                "make it again as docs/security.md says"
            ),
        )
        missing = "missing permission: get the Secret muster-nats-reader in the namespace muster ("
        assert without["bus"][1].startswith(missing)
        assert (without["health"][0], without["pods"][0]) == ("OK", "OK")
        assert blind["pods"][1].startswith(
            "missing permission: list pods in the namespace muster ("
        )

    asyncio.run(story())


SECRET: Final = "hunter2-S3cr3tW0rd"  # noqa: S105  # to be removed
SETTINGS: Final = f"""
bus: {{url: "nats://notifier:{SECRET}@muster-nats:4222"}}
group_wait_s: 5
receivers:
  - {{name: ops, slack: {{token: {{env: SLACK_TOKEN}}, channel: "#ops"}}}}
  - {{name: old, webhook: {{url: "https://hooks.example.com/services/{SECRET}"}}}}
  - {{name: pager, pagerduty: {{routing_key: "{SECRET}"}}}}
"""
GONE: Final = "unable to retrieve container logs for containerd://3a14"
LOG: Final = f"""
{{"event":"bus_disconnected","url":"nats://notifier:{SECRET}@muster-nats:4222"}}
{{"event":"delivery_failed","url":"https://hooks.example.com/services/{SECRET}","status":404}}
{{"event":"rejected","body":"{{\\"token\\":\\"{SECRET}\\"}}"}}
plain text with password={SECRET} and Authorization: Bearer {SECRET}
{{"event":"listening","http":"http://0.0.0.0:8080"}}
"""


async def with_secrets(world: World) -> None:
    """Put a secret into every kind of object that a bundle contains."""
    await world.secret("muster-notifier-receivers", "slack-token", SECRET)
    tree = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    broken = f"receivers: [{{{{token: {SECRET}"
    data = {"notifier.yaml": SETTINGS, "broken.yaml": broken, "nats.conf": f"password: {SECRET}"}
    await world.create("configmaps", {**tree, "data": data})
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "muster-gate-0",
            "labels": {
                "app.kubernetes.io/name": "muster-gate",
                "app.kubernetes.io/part-of": "muster",
            },
            "annotations": {"note": SECRET},
        },
        "spec": {
            "containers": [
                {
                    "name": "gate",
                    "image": "muster:1",
                    "args": [SECRET],
                    "env": [{"name": "PASSWORD", "value": SECRET}],
                }
            ],
            "volumes": [{"name": "configuration", "configMap": {"name": "settings"}}],
        },
    }
    await world.create("pods", pod)
    ended = {
        "reason": "Error",
        "exitCode": 1,
        "message": f"cannot log on to nats://gate:{SECRET}@muster-nats:4222",
    }
    container = {
        "name": "gate",
        "ready": False,
        "restartCount": 2,
        "image": "muster:1",
        "imageID": "",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    await world.status("muster-gate-0", {"phase": "Running", "containerStatuses": [container]})
    world.stand_in.logs |= {"muster-gate-0": LOG, "muster-gate-0/previous": GONE}


def test_a_bundle_has_what_a_bug_report_needs_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "bundle.tar.gz"

    async def story() -> None:
        async with complete(tmp_path) as (world, _):
            await with_secrets(world)
            code, findings, errors = await in_cluster(world, "--bundle", str(file))
            assert (code, errors) == (
                1,
                f"muster doctor: wrote {file}; read it before you share it\n",
            )
            assert findings["pods"] == (
                "FAIL",
                "no ready pod: muster-gate (muster-gate-0 CrashLoopBackOff)",
            )

    asyncio.run(story())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    content = muster_in_cluster.unpacked(file)
    passwords = (SECRET, nats_with_passwords.PASSWORD)
    leaks = [n for n, text in content.items() for word in passwords if word in n + text]
    assert leaks == []
    names = {name.removeprefix("muster-doctor/") for name in content}
    assert names >= {
        *("report.txt", "report.json", "versions.json", "bus.json", "status.json", "pods.json"),
        "logs/muster-gate-0/gate.log",
        *("settings/settings/notifier.yaml", "settings/settings/nats.conf", "not-included.txt"),
    }
    assert sorted(content["muster-doctor/not-included.txt"].splitlines()) == [
        f"logs/muster-gate-0/gate.previous.log: {GONE.removesuffix('3a14')}(removed)",
        *(
            f"settings/{name}: get /api/v1/namespaces/muster/configmaps/{name}: HTTP 404 "
            f'configmaps "{name}" not found'
            for name in sorted(mounted())
        ),
        "settings/settings/broken.yaml: not valid YAML",
    ]
    settings = orjson.loads(content["muster-doctor/settings/settings/notifier.yaml"])
    assert settings == {
        "bus": {"url": "nats://muster-nats:4222"},
        "group_wait_s": 5,
        "receivers": [
            {"name": "ops", "slack": {"token": {"env": "SLACK_TOKEN"}, "channel": "#ops"}},
            {"name": "old", "webhook": {"url": "https://(removed).example.com/(removed)"}},
            {"name": "pager", "pagerduty": {"routing_key": "(removed)"}},
        ],
    }
    log = content["muster-doctor/logs/muster-gate-0/gate.log"]
    assert log.splitlines()[-1] == '{"event":"listening","http":"http://0.0.0.0:8080"}'
    (gate,) = [
        pod for pod in orjson.loads(content["muster-doctor/pods.json"])
        if pod["name"] == "muster-gate-0"
    ]  # fmt: skip
    assert gate["containers"] == [{"name": "gate", "image": "muster:1", "variables": ["PASSWORD"]}]
    ended = gate["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert ended["message"] == "cannot log on to nats://muster-nats:4222"


def mounted() -> set[str]:
    """Return the ConfigMaps that pods in the stand-in mount, although it does not have them."""
    pods = manifests.pods("minimal")
    parts = ("muster-health", "muster-nats", "muster-notifier", "muster-plugin")
    volumes = [volume for part in parts for volume in pods[part].get("volumes", ())]
    return {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}


def test_without_the_right_to_read_logs_the_bundle_says_so(tmp_path: Path) -> None:
    file = tmp_path / "bundle.tar.gz"

    async def story() -> None:
        async with complete(tmp_path) as (world, _):
            world.deny("get", "pods/log")
            world.deny("get", "configmaps")
            await in_cluster(world, "--bundle", str(file))

    asyncio.run(story())
    notes = muster_in_cluster.unpacked(file)["muster-doctor/not-included.txt"].splitlines()
    assert len(notes) > 4
    rights = ("missing permission: get pods/log in", "missing permission: get the ConfigMap")
    assert [note for note in notes if not any(right in note for right in rights)] == []


def test_a_bundle_overwrites_a_file_only_when_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bundle.tar.gz"
    file.write_bytes(b"mine")
    link = tmp_path / "link"
    link.symlink_to(file)
    long_link = tmp_path / "long"
    long_link.symlink_to("a" * 256)
    options = ("--url", "nats://127.0.0.1:1", "--within", "1s", "--bundle")
    for named, problem in (
        (file, f"{file} exists; --force overwrites it"),
        (link, f"{link} exists; --force overwrites it"),
        (tmp_path, f"{tmp_path} is a directory"),
        (tmp_path / "a" / "b", f"the directory {tmp_path}/a does not exist"),
        (tmp_path / ("a" * 256), f"{tmp_path}/{'a' * 256}: File name too long"),
        (long_link, f"{long_link}: File name too long"),
    ):
        assert registry.call("doctor", *options, str(named)) == 2
        assert capsys.readouterr() == ("", f"muster doctor: --bundle: {problem}\n")
    assert file.read_bytes() == b"mine"
    assert registry.call("doctor", *options, str(link), "--force") == 1
    assert file.read_bytes() == b"mine"
    assert not link.is_symlink()
    assert "muster-doctor/report.txt" in muster_in_cluster.unpacked(link)
    assert stat.S_IMODE(link.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [file, link, long_link]


def test_a_reader_hears_that_only_an_administrator_is_told_about_streams(tmp_path: Path) -> None:
    async def story() -> None:
        async with complete(tmp_path) as (world, link):
            reader = link.link._url.replace("//admin:", "//reader:")
            code, findings, errors = await in_cluster(world, "--url", reader)
        assert (code, errors) == (2, "")
        why = "not permitted: only an administrator of NATS may read streams"
        unseen = {check for check, finding in findings.items() if finding[1] == why}
        assert unseen == {"streams", "consumers", "dead letters", "leaders"}
        assert findings["receivers"] == ("OK", "ops (slack)")
        assert (findings["pods"][0], findings["plugins"][0]) == ("OK", "OK")
        assert "as reader (URL)" in findings["bus"][1]

    asyncio.run(story())


def test_a_nats_that_does_not_answer_fails_and_names_no_other_muster(tmp_path: Path) -> None:
    url = "nats://somebody:s3cret-word@127.0.0.1:1"
    code, findings, errors = asyncio.run(doctor(tmp_path, "--url", url, "--within", "6s"))
    assert (code, errors) == (1, "")
    assert findings["bus"] == (
        "FAIL",
        "NATS at nats://127.0.0.1:1 has not answered for 1 s: Connection refused",
    )
    assert findings["health"] == (
        "NOT CHECKED",
        "no health service was given; pass --context CONTEXT or --health URL",
    )
    assert "s3cret-word" not in repr(findings)


def test_a_stream_that_is_gone_and_a_lock_that_nobody_holds_fail(tmp_path: Path) -> None:
    async def story() -> None:
        async with complete(tmp_path) as (world, link):
            # before the deletions: a write creates missing streams if the server answers late
            dead = "muster.dlq.notification.ops.0123.4567"
            await storage.enqueue(link.link, dead, b"{}", key="dead")
            client = await link.link.client()
            await client.jetstream().delete_stream(streams.LABELS.name)
            for bucket in (streams.LEADER, streams.TENURE):
                await client.jetstream().purge_stream(f"KV_{bucket.name}")
            code, findings, _ = await in_cluster(world)
        assert code == 1
        assert findings["streams"] == (
            "FAIL",
            "MUSTER_LABELS: missing; health creates them when it connects",
        )
        assert findings["dead letters"] == ("WARN", "1 that could not be delivered or processed")
        assert findings["leaders"][0] == "FAIL"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--url", "gopher://x"), "--url: not a NATS address such as nats://127.0.0.1:4222"),
        (("--within", "soon"), "--within: 'soon' is not a duration such as 2h or 1h30m"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = registry.call("doctor", *arguments)
    assert (code, capsys.readouterr()) == (2, ("", f"muster doctor: {problem}\n"))

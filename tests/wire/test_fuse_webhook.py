"""The webhook of the FUSE broker as a process, with the stand-in for the Kubernetes API."""

import asyncio
import base64
import contextlib
import pathlib
import re
import signal
import ssl
import time
from collections.abc import AsyncIterator
from typing import Final

import orjson
import pytest

from muster.kubernetes import api as kubernetes_api
from muster.local import processes
from muster.local.kubernetes import refusals
from muster_fuse.admission import certificate_store, config, event_reporter
from muster_fuse.admission import pod as pods
from tests.worlds import manifests
from tests.worlds.fuse_webhook import (
    CONFIGURATION,
    HOST,
    SECRET,
    Tree,
    World,
    play,
    review_of,
    until,
)

SMARTER: Final = "smarter-devices/fuse"


def pod(*, annotations: dict[str, str] | None = None, **metadata: object) -> Tree:
    resources = {"limits": {SMARTER: "1", "cpu": "1"}, "requests": {SMARTER: "1"}}
    container = {"name": "main", "image": "x", "resources": resources}
    return {
        "metadata": {"annotations": annotations, **metadata},
        "spec": {"containers": [container]},
    }


def paths(response: Tree) -> list[str]:
    """Return the paths that the patch in an answer changes."""
    if "patch" not in response:
        return []
    return [each["path"] for each in orjson.loads(base64.b64decode(response["patch"]))]


REPLACED: Final = [
    "/spec/volumes",
    "/spec/containers/0/volumeMounts",
    "/spec/containers/0/resources/requests/smarter-devices~1fuse",
    "/spec/containers/0/resources/limits/smarter-devices~1fuse",
    "/metadata/annotations",
]


def test_two_replicas_agree_on_a_certificate_that_the_api_server_trusts(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.install()
        first, second = await asyncio.gather(made.start(), made.start())
        await made.ready(first)
        await made.ready(second)
        bundles = await made.bundles()
        assert len(set(bundles)) == 1
        assert base64.b64decode(bundles[0]).count(b"BEGIN CERTIFICATE") == 1
        assert await made.served(first.addresses["https"]) == await made.served(
            second.addresses["https"]
        )
        secret = await made.call("GET", SECRET)
        assert secret["data"].keys() == {"ca.crt", "tls.crt", "tls.key"}
        assert secret["metadata"]["labels"] == {"a": "b"}
        assert (await made.probe(first, "/healthz"))[0] == 200
        shown = await made.ask(first, pod(annotations={"fuse.muster.dev/mount": "true"}))
        assert paths(shown) == REPLACED[:2]
        assert 'pods_total{outcome="mounted"} 1.0' in (await made.probe(first, "/metrics"))[1]
        first.signal(signal.SIGTERM)
        assert await first.wait() == 0

    play(story, tmp_path)


def steps() -> dict[str, float]:
    """Return how often this process has taken each step with the certificate."""
    samples = certificate_store.STEPS.collect()
    return {
        sample.labels["step"]: sample.value
        for family in samples
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_the_next_certificate_is_trusted_before_it_is_used_and_servers_go_on(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.install()
        settings = config.Settings(
            kubernetes=config.Kubernetes(namespace="default"),
            certificates=config.Certificates(lifetime_s=9_000, settle_s=600),
        )
        # in the past, so that each certificate is valid when this test connects
        began = time.time() - 6_000
        now = began
        before = steps()
        async with contextlib.AsyncExitStack() as open_:
            api = await open_.enter_async_context(
                await kubernetes_api.find(kubeconfig=str(tmp_path / "kubeconfig"), context=None)
            )
            stores = [
                certificate_store.CertificateStore(api, settings, clock=lambda: now)
                for _ in range(2)
            ]
            addresses = [await open_.enter_async_context(serving(store)) for store in stores]

            async def after(at: float) -> tuple[set[int], int]:
                """Refresh both; return the certificates served, and the number of authorities."""
                nonlocal now
                now = at
                # both write at once; after a conflict, the later one reads the objects again
                for _ in range(2):
                    await asyncio.gather(*(store.refresh() for store in stores))
                assert [store.problem() for store in stores] == [None, None]
                (bundle,) = set(await made.bundles())
                count = base64.b64decode(bundle).count(b"BEGIN CERTIFICATE")
                return {await made.served(address) for address in addresses}, count

            (old,), trusted = await after(began)
            assert trusted == 1
            assert await after(began + 5_999) == ({old}, 1)
            assert await after(began + 6_000) == ({old}, 2)
            assert await after(began + 6_599) == ({old}, 2)
            now = began + 6_601
            await stores[0].refresh()
            # until the other replica refreshes, both certificates are trusted
            first, second = [await made.served(address) for address in addresses]
            assert (first == old, second) == (False, old)
            assert await after(now) == ({first}, 2)
        taken = {step: count - before.get(step, 0.0) for step, count in steps().items()}
        assert taken == {"issue": 1.0, "prepare": 1.0, "promote": 1.0}

    play(story, tmp_path)


@contextlib.asynccontextmanager
async def serving(store: certificate_store.CertificateStore) -> AsyncIterator[str]:
    """Accept connections with a store's certificate; yield the URL."""

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0, ssl=store.tls) as server:
        host, port = server.sockets[0].getsockname()
        yield f"https://{host}:{port}"


def test_what_somebody_breaks_in_secret_or_configuration_is_repaired(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.install()
        often = {"lifetime_s": 3600, "settle_s": 1, "check_s": 0.2}
        replica = await made.start(certificates=often)
        await made.ready(replica)
        old = await made.served(replica.addresses["https"])
        broken = {"tls.key": base64.b64encode(b"nonsense").decode(), "ca.crt": "?"}
        await made.call("PATCH", SECRET, {"data": broken})
        webhooks = (await made.call("GET", CONFIGURATION))["webhooks"]
        del webhooks[0]["clientConfig"]["caBundle"]
        await made.call("PATCH", CONFIGURATION, {"webhooks": webhooks})

        async def is_repaired() -> bool:
            if len({*await made.bundles()}) != 1:
                return False
            try:
                return await made.served(replica.addresses["https"]) != old
            except ssl.SSLError:
                return False

        await until(is_repaired)

    play(story, tmp_path)


def test_without_its_objects_it_is_not_ready_and_says_why(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        replica = await made.start()

        async def says(text: str) -> bool:
            status, body = await made.probe(replica, "/readyz")
            return status == 503 and text in body

        await until(lambda: says(f"get {SECRET}: HTTP 404"))
        await made.install()
        await made.ready(replica)

    play(story, tmp_path)


def test_a_certificate_that_is_not_trusted_yet_is_logged_once_and_so_is_the_recovery(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.install()
        made.api.refuse(CONFIGURATION, refusals.Reason.UNAVAILABLE)
        replica = await made.start()

        async def is_refused() -> bool:
            status, body = await made.probe(replica, "/readyz")
            return status == 503 and f"get {CONFIGURATION}: HTTP 503" in body

        await until(is_refused)
        made.api.allow(CONFIGURATION)
        await made.ready(replica)
        log = (made.directory / "webhook-0.log").read_text().splitlines()
        events = [orjson.loads(line)["event"] for line in log]
        assert [event for event in events if event.startswith("certificate_")] == [
            "certificate_changed",
            "certificate_update_failed",
            "certificate_update_recovered",
        ]

    play(story, tmp_path)


def test_the_annotation_of_the_namespace_decides_about_the_resource(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.install()
        replica = await made.start()
        await made.ready(replica)
        made.api.refuse("/api/v1/namespaces/apps", refusals.Reason.UNAVAILABLE)
        (warning,) = (await made.ask(replica, pod()))["warnings"]
        assert "the pod stays unchanged, because its namespace could not be read" in warning
        made.api.allow("/api/v1/namespaces/apps")

        async def replaces(*expected: str) -> bool:
            return paths(await made.ask(replica, pod())) == [*expected]

        await until(replaces)
        await made.annotate("apps", replace=SMARTER)
        await until(lambda: replaces(*REPLACED))
        # the last known annotation stays in use while the API server does not answer
        made.api.refuse("/api/v1/namespaces/apps", refusals.Reason.UNAVAILABLE)
        answers = [await made.ask(replica, pod()) for _ in range(2)]
        assert [paths(answer) for answer in answers] == [REPLACED, REPLACED]
        made.api.allow("/api/v1/namespaces/apps")
        await made.annotate("apps", replace="fuse")

        async def warns() -> bool:
            shown = await made.ask(replica, pod())
            text = "fuse.muster.dev: the namespace's annotation fuse.muster.dev/replace: 'fuse' is "
            return shown.get("warnings") == [f"{text}not a resource"] and not paths(shown)

        await until(warns)

    play(story, tmp_path)


def test_a_conflict_is_an_event_about_who_made_the_pod_and_is_told_once(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.install()
        replica = await made.start()
        await made.ready(replica)
        bad = {"fuse.muster.dev/mount": "yes"}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "7"}
        owned = pod(annotations=bad, ownerReferences=[{**owner, "controller": True}])
        text = 'annotation fuse.muster.dev/mount: \'yes\' is neither "true" nor "false"'
        for shown in (owned, owned, pod(annotations=bad, name="p"), pod(annotations=bad)):
            answer = await made.ask(replica, shown)
            assert answer == {"warnings": [f"fuse.muster.dev: {text}"]}
        await made.ask(replica, pod(annotations=bad, name="tried"), dryRun=True)

        async def are_written() -> bool:
            return (
                'events_total{outcome="written"} 2.0' in (await made.probe(replica, "/metrics"))[1]
            )

        await until(are_written)
        events = sorted(await made.events(), key=lambda event: event["involvedObject"]["kind"])
        about = [event["involvedObject"] for event in events]
        assert about == [
            {**owner, "namespace": "apps"},
            {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "apps"},
        ]
        assert {(e["type"], e["reason"], e["message"]) for e in events} == {
            ("Warning", "FuseNotMounted", f"{event_reporter.PREFIX}{text}")
        }

    play(story, tmp_path)


JOB: Final = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "7"}


def controlled(owner: Tree, **metadata: object) -> Tree:
    """Return a pod of this controller whose annotation has an invalid value."""
    owners = [{**owner, "controller": True}]
    return pod(annotations={"fuse.muster.dev/mount": "yes"}, ownerReferences=owners, **metadata)


async def events_are(made: World, replica: processes.Process, **expected: int) -> bool:
    """Return whether a replica counts the expected number of Events of each outcome."""
    body = (await made.probe(replica, "/metrics"))[1]
    return all(
        f'events_total{{outcome="{outcome}"}} {count}.0' in body
        for outcome, count in expected.items()
    )


def test_an_event_is_about_what_makes_pods_or_the_pod_or_else_its_namespace(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.install()
        replica = await made.start()
        await made.ready(replica)
        for namespace in ("default", "kube-system"):
            assert await made.ask(replica, controlled(JOB), namespace=namespace) == {}
        node = {"apiVersion": "v1", "kind": "Node", "name": "n0", "uid": "8"}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "coredns", "uid": "9"}
        for shown in (
            controlled(JOB, name="p"),
            controlled(node, name="p"),
            controlled({**JOB, "name": "URGENT: call 555"}, name="q"),
            controlled({**JOB, "uid": "URGENT: call 555"}, name="URGENT: call 555"),
            controlled(deployment),
        ):
            assert "warnings" in await made.ask(replica, shown)
        await until(lambda: events_are(made, replica, written=4, repeated=1))
        about = [event["involvedObject"] for event in await made.events()]
        core = {"apiVersion": "v1", "namespace": "apps"}
        assert sorted(about, key=lambda each: (each["kind"], each["name"])) == [
            {**JOB, "namespace": "apps"},
            {**core, "kind": "Namespace", "name": "apps"},
            {**core, "kind": "Pod", "name": "p"},
            {**core, "kind": "Pod", "name": "q"},
        ]

    play(story, tmp_path)


def test_events_about_one_namespace_leave_those_of_another_their_share(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.install()
        replica = await made.start()
        await made.ready(replica)
        for number in range(60):
            forged = controlled({**JOB, "name": f"j{number}"})
            await made.ask(replica, forged, namespace="noisy")
        await made.ask(replica, controlled(JOB))
        await until(lambda: events_are(made, replica, written=1, failed=10, too_many=50))
        (event,) = await made.events()
        assert event["involvedObject"] == {**JOB, "namespace": "apps"}
        log = (made.directory / "webhook-0.log").read_text().splitlines()
        logged = [orjson.loads(line)["event"] for line in log]
        assert logged.count("pod_left_unchanged") == 11

    play(story, tmp_path)


def attempts() -> float:
    """Return how many Events this process has tried to write."""
    return sum(
        sample.value
        for family in event_reporter.EVENTS.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["outcome"] in {"written", "failed"}
    )


def test_an_event_for_which_there_was_no_room_is_written_as_soon_as_there_is(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        now = 0.0
        async with await kubernetes_api.find(
            kubeconfig=str(tmp_path / "kubeconfig"), context=None
        ) as api:
            reporter = event_reporter.EventReporter(api, timeout_s=1, clock=lambda: now)

            def report(namespace: str, names: list[str]) -> None:
                for name in names:
                    reporter.report(namespace, pods.Metadata(name=name), "why")

            async def write(count: int) -> None:
                """Write the queued Events, which must be `count`."""
                expected = attempts() + count

                async def are_tried() -> bool:
                    return attempts() >= expected

                writing = asyncio.create_task(reporter.run())
                await until(are_tried)
                # an Event too many would be written meanwhile
                await asyncio.sleep(0.1)
                writing.cancel()
                await asyncio.wait([writing])
                assert attempts() == expected

            first, second, third = ([f"{c}{number}" for number in range(10)] for c in "abc")
            # the namespace has no token for the eleventh
            report("apps", [*first, "late"])
            await write(10)
            now = 60.0
            report("apps", ["a0", "late"])
            await write(1)

            # others use up the tokens of all namespaces, but not those of this namespace
            now = 1200.0
            for other in range(10):
                report(f"n{other}", first)
            await write(100)
            report("apps", second)
            now = 1210.0
            report("apps", second)
            await write(10)

            # others fill the queue
            now = 2400.0
            for other in range(10):
                report(f"n{other}", first)
            now = 2410.0
            report("apps", third)
            await write(100)
            report("apps", third)
            await write(10)
        names = [event["involvedObject"]["name"] for event in await made.events()]
        assert sorted(names) == sorted([*first, *second, *third, "late"])

    play(story, tmp_path)


def test_large_pods_at_once_take_no_more_memory_than_the_container_has(
    tmp_path: pathlib.Path,
) -> None:
    owners = b",".join([b"{}"] * 1_300_000)
    container = b'{"resources":{"limits":{"a/b":"1"}}}'
    large = b'{"metadata":{"ownerReferences":[%b]},"spec":{"containers":[%b]}}' % (
        owners,
        container,
    )

    async def story(made: World) -> None:
        await made.install()
        replica = await made.start()
        await made.ready(replica)
        # as many as are answered at once; each has its own namespace, which is read while
        # others are decoded
        bodies = [review_of(orjson.Fragment(large), namespace=f"n{number}") for number in range(32)]
        assert (await made.post(replica, bodies[0]))[0] == 200
        for _ in range(10):  # a busy machine answers some of them, or none, in time
            answers = await asyncio.gather(*(made.post(replica, body) for body in bodies))
            statuses = {status for status, _ in answers}
            assert statuses <= {200, 503}
            if 200 in statuses:
                break
        else:
            pytest.fail("none was answered")
        status = pathlib.Path(f"/proc/{replica.pid}/status").read_text()
        (peak_kib,) = re.findall(r"VmHWM:\s*(\d+) kB", status)
        assert int(peak_kib) * 1024 < memory_limit()

    play(story, tmp_path)


def memory_limit() -> int:
    """Return how many bytes of memory the webhook's container has."""
    file = manifests.ROOT / "k8s/components/fuse-webhook/webhook.yaml"
    (mebibytes,) = re.findall(r"limits: {memory: (\d+)Mi}", file.read_text())
    return int(mebibytes) * 1024 * 1024


def test_no_question_ends_in_an_error_of_the_webhook(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.install()
        replica = await made.start()
        await made.ready(replica)
        unreadable: list[object] = [None, [], {"metadata": {}}, {"metadata": {}, "spec": []}]
        for strange in unreadable:
            answer = await made.ask(replica, strange)
            (warning,) = answer.pop("warnings")
            assert answer == {}
            assert warning.startswith("fuse.muster.dev: the pod cannot be read: ")
        assert await made.ask(replica, pod(), operation="UPDATE") == {}
        for body in (b"", b"\xff", b"{}", b"[" * 1_000_000):
            assert (await made.post(replica, body))[0] == 400
        assert (await made.post(replica, b" " * (5 * 1024 * 1024)))[0] == 413
        host = replica.addresses["https"].removeprefix("https://").rpartition(":")
        reader, writer = await asyncio.open_connection(
            host[0], int(host[2]), ssl=await made.tls(), server_hostname=HOST
        )
        writer.write(b"POST /pods HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        async with asyncio.timeout(6):
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        writer.close()
        # more than are answered at once
        asked = 100
        answers = await asyncio.gather(
            *(
                made.ask(replica, pod(annotations={"fuse.muster.dev/mount": "true"}))
                for _ in range(asked)
            )
        )
        assert [paths(answer) for answer in answers] == [REPLACED[:2]] * asked
        log = (made.directory / "webhook-0.log").read_text().splitlines()
        assert "error" not in {orjson.loads(line)["level"] for line in log}

    play(story, tmp_path)


def test_connections_that_say_nothing_keep_nobody_out(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        await made.install()
        replica = await made.start()
        await made.ready(replica)
        tls = await made.tls()
        host, _, port = replica.addresses["https"].removeprefix("https://").rpartition(":")
        silent = [
            await asyncio.open_connection(host, int(port), ssl=tls, server_hostname=HOST)
            for _ in range(300)
        ]
        assert await made.ask(replica, pod()) == {}
        # the oldest connections were closed, the newest were not
        async with asyncio.timeout(10):
            assert await silent[0][0].read() == b""
        assert not silent[-1][0].at_eof()
        for _, writer in silent:
            writer.transport.abort()

    play(story, tmp_path)

"""The overlay `watch` with third-party device plugins and a DRA driver, on a real kubelet.

Each fault has the right verdict and evidence and is resolved, and watching does not affect the
plugins. generic-device-plugin is included if it is in the PATH.
"""

import base64
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from muster import vocabulary
from muster.kubernetes import plugin_facts
from scripts.cluster import layout
from scripts.cluster import peers as programs
from tests.worlds import cluster_faults, dra_driver, dra_pods, peers, real_cluster
from tests.worlds.cluster_faults import Muster
from tests.worlds.nvml import fake, scenes

pytestmark = [pytest.mark.cluster, pytest.mark.peers, pytest.mark.timeout(900)]

ALL: Final = (peers.NVIDIA, peers.INTEL, peers.SAMPLE, peers.GENERIC)
AGENT: Final = "device-plugin"
UNDISTURBED_S: Final = 60.0
SETTLED_S: Final = 40.0
"""Longer than health waits for a restarted kubelet, and for the slowest finding."""
RESOLVED_S: Final = 200.0
RARELY_FLAPPING: Final = {"flap_window_s": 30.0}
"""Otherwise flap damping would delay the recovery of plugins that fail as often as here."""

_LAMPS: Final = {"name": "lamps", "labels": ["app=lamps"], "drivers": [dra_driver.NAME]}
READS: Final = {"reads_plugins": True, "known": [_LAMPS]}
"""Health also reads the driver's objects from the API, every minute; two readings must agree."""
SHOWN_BY_API_S: Final = plugin_facts.NEW_NODE_S + 240.0
"""The limit for a verdict from the API: nodes that became Ready recently are not evaluated."""


@dataclass(frozen=True)
class World:
    """A cluster with peers, their hardware, a DRA driver, and muster, which watches them."""

    muster: Muster
    hardware: peers.Hardware
    plugins: Mapping[str, peers.Plugin]
    lamps: dra_pods.Lamps

    def plugin(self, peer: peers.Peer) -> peers.Plugin:
        """Return a peer's plugin; skip the test if it does not run here."""
        if peer.name not in self.plugins:
            pytest.skip(f"{peer.program} is not in the PATH")
        return self.plugins[peer.name]

    def about(self, name: str) -> Muster:
        """Return muster's view of a resource or a driver."""
        return self.muster.about(vocabulary.watched_plugin(name))


@pytest.fixture(scope="module")
def world(
    cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    if Path(cluster.kubeconfig) != layout.KUBECONFIG:
        pytest.skip("only the cluster of make cluster has the images and the hardware")
    peers.import_images()
    folder = tmp_path_factory.mktemp("watch")
    present = [each for each in ALL if each is not peers.GENERIC or shutil.which(programs.GENERIC)]
    learned = peers.PLUGINS / "muster"
    with contextlib.ExitStack() as stack:
        # what an agent has learned about the node remains there after the agent's end
        shutil.rmtree(learned, ignore_errors=True)
        stack.callback(shutil.rmtree, learned, ignore_errors=True)
        stack.callback(cluster.renew_node)
        try:
            hardware = stack.enter_context(peers.Hardware().plugged_in())
        except fake.NoCompiler as error:
            pytest.skip(str(error))
        plugins = {peer.name: stack.enter_context(peers.running(cluster, peer)) for peer in present}
        lamps = stack.enter_context(dra_pods.running(cluster))
        install = contextlib.contextmanager(cluster_faults.installed)
        muster = stack.enter_context(
            install(
                cluster,
                folder,
                RARELY_FLAPPING,
                overlay="watch",
                components=["watch-drivers"],
                reads=READS,
            )
        )
        made = World(muster, hardware, plugins, lamps)
        for name in (*(peer.resource for peer in present), dra_driver.NAME):
            made.about(name).until_healthy()
        yield made


@pytest.fixture(autouse=True)
def _healthy_before(world: World) -> None:
    if not world.lamps.slices():
        # a kubelet that starts removes the slices of its node
        world.lamps.publish()
    for name in (*(each.peer.resource for each in world.plugins.values()), dra_driver.NAME):
        world.about(name).until_healthy(within_s=RESOLVED_S)


@contextlib.contextmanager
def expected(
    world: World, name: str, verdict: str, rule: str, *, within_s: float
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield a function that waits for the verdict on a fault, which the block injects and repairs.

    After the block, wait until the plugin is healthy and its alert is resolved.
    """
    view, began = world.about(name), time.monotonic()

    def seen() -> dict[str, Any]:
        shown = view.until_plugin(lambda s: s["verdict"] == verdict, verdict, within_s=within_s)
        took_s = time.monotonic() - began
        kind = shown["alerts"][0]["kind"] if shown["alerts"] else verdict.lower()
        view.until_notified(kind, "firing", since=began, within_s=30.0)
        notified_s = time.monotonic() - began
        print(f"{name}: {rule}: verdict {took_s:.1f} s, notified {notified_s:.1f} s")  # noqa: T201
        assert shown["rule"] == rule, shown
        assert shown["evidence"], shown
        return shown

    yield seen
    view.until_healthy(within_s=RESOLVED_S)
    view.until_notified(verdict.lower(), "resolved", since=began, within_s=30.0)


def texts(shown: Mapping[str, Any]) -> str:
    """Return the evidence as one text."""
    return "\n".join(str(each["observed"]) for each in shown["evidence"])


def alerts(world: World, since: float) -> list[tuple[str, str, str]]:
    """Return the alerts about watched plugins that fired since then."""
    alerts_ = [each.alert for each in world.muster.webhook.taken if each.at >= since]
    return [
        (alert["watched"], alert["kind"], alert["summary"])
        for alert in alerts_
        if alert["watched"] and alert["state"] == "firing"
    ]


def test_every_peer_is_listed_as_watched_with_its_devices(world: World) -> None:
    for plugin in world.plugins.values():
        shown = world.about(plugin.peer.resource).plugin()
        assert (shown["state"], shown["verdict"]) == ("healthy", "HEALTHY")
    cluster = world.muster.cluster
    url = f"http://{world.muster.health[0]}:8080"
    printed = cluster.muster("why", cluster.node, "--health", url, "--url", bus_url(cluster))
    for plugin in world.plugins.values():
        assert f"{plugin.peer.resource} (watched) is HEALTHY" in printed


def bus_url(cluster: real_cluster.Cluster) -> str:
    """Return the URL of NATS with the reader's password."""
    secret = cluster.get("secret", "muster-nats-reader", "-n", real_cluster.NAMESPACE)
    password = base64.b64decode(secret["data"]["password"]).decode()
    (server,) = cluster.pods("muster-nats")
    return f"nats://reader:{password}@{server['status']['podIP']}:4222"


def test_the_peers_notice_nothing_of_being_watched(world: World) -> None:
    plugins = list(world.plugins.values())
    before = [(p.errors(), p.calls(), p.restarts(), p.pid()) for p in plugins]
    files = [p.descriptors() for p in plugins]
    calls = world.lamps.events().count("NodePrepareResources")
    infos = world.lamps.events().count("GetInfo")
    time.sleep(UNDISTURBED_S)
    assert [(p.errors(), p.calls(), p.restarts(), p.pid()) for p in plugins] == before
    # a connection may be open at the moment
    assert all(p.descriptors() <= files[i] + 1 for i, p in enumerate(plugins))
    assert world.lamps.events().count("NodePrepareResources") == calls
    assert 1 <= world.lamps.events().count("GetInfo") - infos <= 5


def test_the_devices_of_a_watched_peer_are_given_to_pods(world: World) -> None:
    given = "echo $NVIDIA_VISIBLE_DEVICES"
    printed = world.muster.cluster.run_pod({peers.NVIDIA.resource: "1"}, given)
    assert printed.strip() in {gpu.uuid for gpu in scenes.h100x8().gpus}


@pytest.mark.parametrize("peer", ALL, ids=lambda peer: peer.name)
def test_a_peer_that_is_stopped_is_stuck(world: World, peer: peers.Peer) -> None:
    plugin = world.plugin(peer)
    rule = "watched_no_answer"
    with expected(world, peer.resource, "STUCK", rule, within_s=25.0) as seen, plugin.stopped():
        shown = seen()
    assert "no answer to GetDevicePluginOptions within 4 s" in texts(shown), texts(shown)


# the sample plugin does not register after a restart, so it would get another verdict
@pytest.mark.parametrize(
    "peer", [peers.NVIDIA, peers.INTEL, peers.GENERIC], ids=lambda peer: peer.name
)
def test_a_peer_that_is_killed_again_and_again_is_down(world: World, peer: peers.Peer) -> None:
    plugin = world.plugin(peer)
    with expected(world, peer.resource, "PLUGIN_DOWN", "watched_not_served", within_s=15.0) as seen:
        with plugin.crashing():
            seen()
        plugin.until_offered()


@pytest.mark.parametrize("peer", [peers.NVIDIA, peers.SAMPLE], ids=lambda peer: peer.name)
def test_a_peer_cut_from_its_socket_is_deregistered(world: World, peer: peers.Peer) -> None:
    plugin = world.plugin(peer)
    rule = "watched_socket_removed"
    with expected(world, peer.resource, "DEREGISTERED", rule, within_s=8.0) as seen:
        plugin.remove_socket()
        seen()
        # the kubelet still has the stream, so the node still offers the devices
        plugin.until_offered()
        plugin.start_again()


def test_a_peer_that_a_kubelet_dropped_while_it_was_stopped_is_deregistered(world: World) -> None:
    plugin = world.plugin(peers.NVIDIA)
    rule = "watched_socket_removed"
    with expected(world, peers.NVIDIA.resource, "DEREGISTERED", rule, within_s=90.0) as seen:
        with plugin.stopped():
            cluster_faults.kubelet("restart")
            seen()
        plugin.until_offered()
        world.plugin(peers.SAMPLE).until_offered()


def test_a_peer_that_does_not_register_with_a_new_kubelet_is_deregistered(world: World) -> None:
    plugin = world.plugin(peers.SAMPLE)
    rule = "watched_not_registered"
    with expected(world, peers.SAMPLE.resource, "DEREGISTERED", rule, within_s=90.0) as seen:
        cluster_faults.kubelet("restart")
        shown = seen()
        plugin.until_offered()
    assert "0 of 2" in texts(shown), texts(shown)


def test_a_peer_whose_gpus_all_fail_offers_none(world: World) -> None:
    plugin = world.plugin(peers.NVIDIA)
    rule = "watched_not_registered"
    with expected(world, peers.NVIDIA.resource, "DEREGISTERED", rule, within_s=20.0) as seen:
        world.hardware.lose_gpus()
        shown = seen()
        world.hardware.gpus.write(scenes.h100x8())
        plugin.start_again()
    assert "0 of 8" in texts(shown), texts(shown)


def test_a_peer_that_loses_some_gpus_offers_fewer(world: World) -> None:
    plugin = world.plugin(peers.NVIDIA)
    rule = "watched_fewer_devices"
    with expected(world, peers.NVIDIA.resource, "MISMATCH", rule, within_s=50.0) as seen:
        world.hardware.gpus.xid(0, 79)
        shown = seen()
        world.hardware.gpus.write(scenes.h100x8())
        plugin.start_again()
    assert "7 of 8" in texts(shown), texts(shown)


def test_a_peer_whose_hardware_is_pulled_out_is_found(world: World) -> None:
    plugin = world.plugin(peers.GENERIC)
    rule = "watched_not_registered"
    # after a restart of the kubelet, the plugin would send changes to the old kubelet's stream
    plugin.start_again()
    world.about(peers.GENERIC.resource).until_healthy()
    with expected(world, peers.GENERIC.resource, "DEREGISTERED", rule, within_s=25.0) as seen:
        world.hardware.serial(plugged=False)
        seen()
        world.hardware.serial(plugged=True)
        plugin.until_offered()


def test_a_peer_that_ends_itself_as_it_has_no_gpu_is_down(world: World) -> None:
    plugin = world.plugin(peers.INTEL)
    rule = "watched_not_served"
    # a young pod without restarts could be the replacement of another
    plugin.restart()
    real_cluster.until(lambda: plugin.calls() > 0, "the kubelet lists its devices again")
    world.about(peers.INTEL.resource).until_healthy()
    # the plugin removes its socket before it ends; that is the first finding, corrected later
    with expected(world, peers.INTEL.resource, "PLUGIN_DOWN", rule, within_s=60.0) as seen:
        world.hardware.intel(0)
        try:
            seen()
        finally:
            world.hardware.intel(2)
        plugin.until_offered()


def test_a_rollout_of_a_peer_alerts_nobody(world: World) -> None:
    plugin = world.plugin(peers.NVIDIA)
    where = ("-n", "kube-system", "rollout")
    daemonset = f"daemonset/{peers.NVIDIA.daemonset}"
    began = time.monotonic()
    world.muster.cluster.good(*where, "restart", daemonset)
    world.muster.cluster.good(*where, "status", daemonset, "--timeout=90s")
    plugin.until_offered()
    time.sleep(SETTLED_S)
    assert alerts(world, began) == []


def lamps_stopped(world: World) -> AbstractContextManager[None]:
    return world.lamps.stopped()


def lamps_crashing(world: World) -> AbstractContextManager[None]:
    return world.lamps.crashing()


@contextlib.contextmanager
def lamps_unregistered(world: World) -> Iterator[None]:
    """Remove the driver's registration socket; after the block, delete its pod."""
    world.lamps.registration.unlink()
    try:
        yield
    finally:
        world.lamps.delete_pod()


@contextlib.contextmanager
def lamps_uncallable(world: World) -> Iterator[None]:
    """Remove the socket on which the driver is called; after the block, delete its pod."""
    world.lamps.service.unlink()
    try:
        yield
    finally:
        world.lamps.delete_pod()


@pytest.mark.parametrize(
    ("fault", "verdict", "rule", "within_s"),
    [
        (lamps_stopped, "STUCK", "watched_no_answer", 25.0),
        (lamps_crashing, "PLUGIN_DOWN", "watched_not_served", 15.0),
        (lamps_unregistered, "DEREGISTERED", "watched_socket_removed", 8.0),
        (lamps_uncallable, "DEREGISTERED", "watched_socket_removed", 25.0),
    ],
)
def test_what_happens_to_a_driver_is_found(
    world: World,
    fault: Callable[[World], AbstractContextManager[None]],
    verdict: str,
    rule: str,
    within_s: float,
) -> None:
    with (
        world.lamps.claimed(),
        expected(world, dra_driver.NAME, verdict, rule, within_s=within_s) as seen,
        fault(world),
    ):
        seen()


def test_a_driver_whose_pool_lacks_a_slice_offers_too_little(world: World) -> None:
    rule, limit_s = "watched_fewer_devices", SHOWN_BY_API_S
    with expected(world, dra_driver.NAME, "MISMATCH", rule, within_s=limit_s) as seen:
        world.lamps.publish(said=2)
        try:
            shown = seen()
        finally:
            world.lamps.publish(generation=2)
    assert "1 of 2 slices" in texts(shown), texts(shown)


def test_a_driver_whose_slices_were_deleted_offers_nothing(world: World) -> None:
    rule, limit_s = "watched_fewer_devices", SHOWN_BY_API_S
    with (
        world.lamps.claimed(),
        expected(world, dra_driver.NAME, "MISMATCH", rule, within_s=limit_s) as seen,
    ):
        world.lamps.withdraw()
        try:
            shown = seen()
        finally:
            world.lamps.publish()
    assert "no ResourceSlice" in texts(shown), texts(shown)

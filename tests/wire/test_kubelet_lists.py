"""Statements about a kubelet: the effects of messages on ListAndWatch."""

import time

import grpc.aio
import pytest

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import podresources_pb2 as podres
from tests.worlds import device_plugin
from tests.worlds.kubelet_statements import Kubelet, statement, until


@statement
async def test_each_message_replaces_the_whole_list(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b", "c")
    await kubelet.shows("3", "3")
    plugin.send("d")
    await kubelet.shows("1", "1")
    assert await kubelet.listed() == ["d"]
    plugin.send()
    await kubelet.shows("0", "0")
    assert await kubelet.listed() == []


@statement
async def test_only_the_word_healthy_is_healthy(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    plugin.send("a", b="Unhealthy", c="healthy", d="Broken", e="")
    await kubelet.shows("5", "1")
    assert await kubelet.listed() == ["a"]


@statement
async def test_an_id_sent_with_both_healths_counts_twice(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("x")
    await kubelet.shows("1", "1")
    plugin.streams[0].send(device_plugin.devices("a", "b", a="Unhealthy"))
    await kubelet.shows("3", "2")


@statement
async def test_ids_are_not_checked(kubelet: Kubelet) -> None:
    ids = ["", "with blanks", "with\nnewline", "x" * 64, "y" * 4000]
    await kubelet.plugin(*ids)
    await kubelet.shows("5", "5")
    assert await kubelet.listed() == sorted(ids)


@statement
async def test_quantities_are_written_in_canonical_form(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin(*map(str, range(1500)))
    await kubelet.shows("1500", "1500")
    plugin.send(*map(str, range(1000)))
    await kubelet.shows("1k", "1k")


@statement
async def test_5000_ids_of_300_characters_are_one_message(kubelet: Kubelet) -> None:
    await kubelet.plugin(*(f"{number:0300}" for number in range(5000)))
    await kubelet.shows("5k", "5k")


@statement
async def test_a_message_over_4_mib_ends_the_stream(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.shows("2", "2")
    plugin.send(*(f"{number:01000}" for number in range(4300)))
    await kubelet.shows("2", "0")
    await plugin.streams[0].ended.wait()


@statement
async def test_of_1000_messages_at_once_the_last_one_stays(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    for number in range(1000):
        plugin.send(f"id-{number}")
    await kubelet.lists("id-999")
    assert len(plugin.streams) == 1


@statement
async def test_the_checkpoint_has_the_healthy_ids_and_what_pods_hold(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b")
    plugin.send("a", b="Unhealthy")
    await kubelet.lists("a")
    name = await kubelet.pod(1)
    await kubelet.runs(name)

    async def data() -> dict[str, object]:
        read: dict[str, object] = kubelet.checkpoint()["Data"]
        return read

    saved = await until(
        "a checkpoint",
        data,
        lambda data: (
            data["RegisteredDevices"].get(kubelet.resource) == ["a"]
            and any(entry["ResourceName"] == kubelet.resource for entry in data["PodDeviceEntries"])
        ),
    )
    entries = [e for e in saved["PodDeviceEntries"] if e["ResourceName"] == kubelet.resource]
    uid = (await kubelet.get(f"/api/v1/namespaces/default/pods/{name}"))["metadata"]["uid"]
    assert [(entry["PodUID"], entry["ContainerName"], entry["DeviceIDs"]) for entry in entries] == [
        (uid, "c0", {"-1": ["a"]})
    ]


@statement
async def test_podresources_list_healthy_ids_also_allocated_ones(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.lists("a", "b")
    name = await kubelet.pod(1)
    await kubelet.runs(name)
    assert await kubelet.listed() == ["a", "b"]
    (held,) = plugin.allocations[0]
    assert (await kubelet.holdings())[name] == {"c0": held}
    plugin.send(a="Unhealthy", b="Healthy")
    await kubelet.lists("b")
    assert (await kubelet.holdings())[name] == {"c0": held}


@statement
async def test_a_deleted_pod_holds_nothing_any_more(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    name = await kubelet.pod(1)
    await kubelet.runs(name)
    await kubelet.delete(name)

    async def holders() -> set[str]:
        return {*await kubelet.holdings()}

    await until("free again", holders, lambda names: name not in names)
    await kubelet.runs(await kubelet.pod(1))
    assert plugin.allocations == [[["a"]], [["a"]]]


@statement
async def test_an_id_on_two_numa_nodes_is_in_two_entries_of_podresources(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin(register=False)
    topology = dp.TopologyInfo(nodes=[dp.NUMANode(ID=0), dp.NUMANode(ID=1)])
    plugin.greeting = [dp.Device(ID="a", health="Healthy", topology=topology)]
    await kubelet.register(plugin)
    await kubelet.lists("a", "a")
    name = await kubelet.pod(1)
    await kubelet.runs(name)
    assert (await kubelet.holdings())[name] == {"c0": ["a", "a"]}


@statement
async def test_podresources_know_no_other_pods(kubelet: Kubelet) -> None:
    request = podres.GetPodResourcesRequest(pod_name="x", pod_namespace="y")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await kubelet.ask_podresources(lambda client: client.get(request))
    assert (raised.value.code().name, raised.value.details()) == (
        "UNKNOWN",
        "pod x in namespace y not found",
    )


@statement
async def test_podresources_refuse_what_is_more_than_a_burst_of_ten_calls(kubelet: Kubelet) -> None:
    began = time.monotonic()
    answers = await kubelet.burst(200)
    took_s = time.monotonic() - began
    # earlier calls may have used up the burst, and 100 calls a second are answered
    assert 1 <= answers["OK", ""] <= 11 + 100 * took_s
    assert answers.keys() == {("OK", ""), ("RESOURCE_EXHAUSTED", "rejected by rate limit")}

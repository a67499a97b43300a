"""Statements about a kubelet: registrations, streams, and what is left when they end."""

import asyncio
import stat

from tests.worlds import device_plugin
from tests.worlds.kubelet_nodes import DOMAIN
from tests.worlds.kubelet_statements import (
    OK,
    Kubelet,
    before_1_37,
    since_1_37,
    statement,
    until,
    until_true,
)

UNKNOWN = "UNKNOWN"


@statement
async def test_options_are_asked_for_before_register_answers(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", register=False)
    assert await kubelet.register(plugin) == OK
    assert plugin.calls[0] == "options"
    await kubelet.shows("1", "1")
    assert plugin.calls == ["options", "list"]


@statement
async def test_a_wrong_version_or_name_is_refused_at_once(kubelet: Kubelet) -> None:
    names = {
        "noslash": 'the ResourceName "noslash" is invalid',
        "kubernetes.io/x": 'the ResourceName "kubernetes.io/x" is invalid',
        "requests.a.example/x": 'the ResourceName "requests.a.example/x" is invalid',
        "A.example/x": 'the ResourceName "A.example/x" is invalid',
        "a.example/": 'the ResourceName "a.example/" is invalid',
        "a.example/-x": 'the ResourceName "a.example/-x" is invalid',
        f"a.example/{'x' * 64}": f'the ResourceName "a.example/{"x" * 64}" is invalid',
        f"{long_domain(245)}/x": f'the ResourceName "{long_domain(245)}/x" is invalid',
    }
    refusals = {name: await kubelet.register("no", resource=name) for name in names}
    assert refusals == {name: (UNKNOWN, text) for name, text in names.items()}
    text = (
        'requested API version "v1alpha2" is not supported by kubelet. '
        'Supported version is ["v1beta1"]'
    )
    assert await kubelet.register("no", version="v1alpha2") == (UNKNOWN, text)


def long_domain(length: int) -> str:
    labels = ".".join(["a" * 60] * 5)
    return f"{labels[: length - len(DOMAIN) - 1]}.{DOMAIN}"


@statement
async def test_a_name_of_63_characters_and_a_domain_of_244_are_accepted(kubelet: Kubelet) -> None:
    for name in (f"{long_domain(244)}/x", f"{DOMAIN}/{'X' * 31}_.{'y' * 30}"):
        plugin = await kubelet.plugin("a", resource=name, register=False)
        assert await kubelet.register(plugin, resource=name) == OK


@statement
async def test_an_endpoint_nobody_serves_is_refused_after_the_dial_limit_of_10_s(
    kubelet: Kubelet,
) -> None:
    outside = await kubelet.plugin("a", folder=kubelet.node.directory, register=False)
    endpoints = ["missing.sock", "", f"../{outside.path.name}x", str(outside.path)]
    clock = asyncio.get_running_loop().time
    before = clock()
    answers = await asyncio.gather(*map(kubelet.register, endpoints))
    text = "failed to dial device plugin: context deadline exceeded"
    assert answers == [(UNKNOWN, text)] * 4
    assert 9 < clock() - before < 20
    assert outside.calls == []


@statement
async def test_an_endpoint_may_lie_in_a_folder_of_the_directory_of_sockets(
    kubelet: Kubelet,
) -> None:
    folder = kubelet.sockets / "folder"
    folder.mkdir(exist_ok=True)
    plugin = await kubelet.plugin("a", folder=folder, register=False)
    assert await kubelet.register(f"folder/{plugin.path.name}") == OK
    await kubelet.shows("1", "1")


@statement
async def test_an_error_from_the_options_refuses_the_registration(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", register=False)
    plugin.options_refusal = "not yet"
    assert await kubelet.register(plugin) == (
        UNKNOWN,
        "failed to get device plugin options: rpc error: code = Internal desc = not yet",
    )
    assert plugin.calls == ["options"]


@since_1_37
async def test_the_deadline_of_register_counts_for_the_options_too(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", register=False)
    plugin.options_held.clear()
    code, _ = await kubelet.register(plugin, timeout_s=0.5)
    # the kubelet's error may arrive before the deadline of the call itself
    assert code in {"CANCELLED", "DEADLINE_EXCEEDED", UNKNOWN}
    plugin.options_held.set()
    assert await kubelet.register(plugin) == OK
    await kubelet.shows("1", "1")
    assert plugin.calls == ["options", "options", "list"]


@statement
async def test_one_endpoint_for_two_names_gets_two_streams(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    other = f"{kubelet.resource}-other"
    assert await kubelet.register(plugin, resource=other) == OK
    await until_true("two streams", lambda: len(plugin.streams) == 2)
    assert plugin.calls.count("list") == 2


@statement
async def test_a_resource_without_a_first_message_is_not_shown(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin(register=False)
    plugin.greeting = None
    assert await kubelet.register(plugin) == OK
    await until_true("a stream", lambda: plugin.streams)
    later = f"{kubelet.resource}-later"
    await kubelet.plugin("a", resource=later)

    async def later_is_shown() -> bool:
        node = await kubelet.get(f"/api/v1/nodes/{kubelet.node.name}")
        return bool(node["status"]["allocatable"].get(later) == "1")

    await until(later, later_is_shown, bool)
    assert await kubelet.shown() == (None, None)


@statement
async def test_a_stream_that_ends_leaves_capacity_and_is_never_opened_again(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.shows("2", "2")
    plugin.streams[0].end()
    await kubelet.shows("2", "0")
    assert await kubelet.listed() == []
    assert plugin.calls == ["options", "list"]


@statement
async def test_a_new_registration_brings_the_count_back(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.shows("2", "2")
    plugin.streams[0].end()
    await kubelet.shows("2", "0")
    assert await kubelet.register(plugin) == OK
    await kubelet.shows("2", "2")
    assert plugin.calls == ["options", "list"] * 2


@statement
async def test_until_the_first_message_a_new_registration_shows_the_old_list(
    kubelet: Kubelet,
) -> None:
    first = await kubelet.plugin("a", "b")
    await kubelet.lists("a", "b")
    await first.stop()
    await kubelet.lists()
    second = await kubelet.plugin(register=False)
    second.greeting = None
    assert await kubelet.register(second) == OK
    await kubelet.shows("2", "0")
    await until_true("a stream", lambda: second.streams)
    second.streams[0].send(device_plugin.devices("c"))
    await kubelet.shows("1", "1")


@statement
async def test_a_second_registration_leaves_the_first_stream_open(kubelet: Kubelet) -> None:
    first = await kubelet.plugin("a")
    await kubelet.lists("a")
    await kubelet.plugin("b")
    await kubelet.lists("b")
    first.send("c")
    await kubelet.lists("c")
    assert not first.streams[0].ended.is_set()


@statement
async def test_the_newest_of_two_registrations_is_asked_to_allocate(kubelet: Kubelet) -> None:
    first = await kubelet.plugin("a")
    await kubelet.lists("a")
    second = await kubelet.plugin("b")
    await kubelet.lists("b")
    await kubelet.runs(await kubelet.pod(1))
    assert (first.allocations, second.allocations) == ([], [[["b"]]])


@before_1_37
async def test_the_end_of_the_old_stream_ends_the_new_one_and_shows_zero(kubelet: Kubelet) -> None:
    first = await kubelet.plugin("a")
    await kubelet.lists("a")
    second = await kubelet.plugin("b")
    await kubelet.lists("b")
    await first.stop()
    await until_true("the new stream's end", second.streams[0].ended.is_set)
    await kubelet.shows("1", "0")


@since_1_37
async def test_the_end_of_the_old_stream_changes_nothing(kubelet: Kubelet) -> None:
    first = await kubelet.plugin("a")
    await kubelet.lists("a")
    second = await kubelet.plugin("b")
    await kubelet.lists("b")
    await first.stop()
    await kubelet.runs(await kubelet.pod(1))
    assert second.allocations == [[["b"]]]
    assert not second.streams[0].ended.is_set()
    await kubelet.shows("1", "1")


@before_1_37
async def test_the_end_of_the_new_stream_shows_zero_and_the_old_one_stays_open(
    kubelet: Kubelet,
) -> None:
    first = await kubelet.plugin("a")
    await kubelet.lists("a")
    second = await kubelet.plugin("b")
    await kubelet.lists("b")
    await second.stop()
    await kubelet.shows("1", "0")
    assert not first.streams[0].ended.is_set()
    first.send("c")
    await kubelet.shows("1", "1")
    reason, message = await kubelet.refused(await kubelet.pod(1))
    assert reason == "UnexpectedAdmissionError"
    assert "has been stopped, which is unexpected" in message
    assert first.allocations == []


@since_1_37
async def test_the_end_of_the_new_stream_leaves_its_list_to_the_old_plugin(
    kubelet: Kubelet,
) -> None:
    first = await kubelet.plugin("a")
    await kubelet.lists("a")
    second = await kubelet.plugin("b")
    await kubelet.lists("b")
    await second.stop()
    await kubelet.admits(1)
    assert first.allocations == [[["b"]]]
    assert await kubelet.listed() == ["b"]
    first.send("c")
    await kubelet.lists("c")


@since_1_37
async def test_the_same_socket_is_refused_while_its_stream_is_open(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    assert await kubelet.register(plugin) == (
        UNKNOWN,
        f"device plugin already connected: {kubelet.node.inside}/device-plugins/{plugin.path.name}",
    )
    plugin.send("b")
    await kubelet.lists("b")
    # because of the refusal, the kubelet no longer knows the socket, and does not notice its end
    await plugin.stop()
    await until_true("the stream's end", plugin.streams[0].ended.is_set)
    assert await kubelet.listed() == ["b"]


@before_1_37
async def test_the_same_socket_gets_a_second_stream(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    assert await kubelet.register(plugin) == OK
    await until_true("two streams", lambda: len(plugin.streams) == 2)


@since_1_37
async def test_a_registration_that_fails_leaves_the_one_that_works(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    broken = await kubelet.plugin(register=False)
    broken.options_refusal = "not yet"
    code, _ = await kubelet.register(broken)
    assert code == UNKNOWN
    plugin.streams[0].end()
    await kubelet.shows("1", "0")


@before_1_37
async def test_a_registration_that_fails_makes_the_kubelet_blind_for_the_end_of_the_other(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    broken = await kubelet.plugin(register=False)
    broken.options_refusal = "not yet"
    code, _ = await kubelet.register(broken)
    assert code == UNKNOWN
    plugin.streams[0].end()
    await until_true("the stream's end", plugin.streams[0].ended.is_set)
    assert await kubelet.listed() == ["a"]
    await kubelet.shows("1", "1")


@statement
async def test_a_restart_wipes_sockets_only_and_shows_zero_until_the_plugin_is_back(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.shows("2", "2")
    kept = kubelet.sockets / "kept"
    kept.write_text("")
    folder = kubelet.sockets / "folder"
    folder.mkdir(exist_ok=True)
    below = await kubelet.plugin(folder=folder, register=False)
    await kubelet.restart()
    await until_true("the stream's end", plugin.streams[0].ended.is_set)
    assert not plugin.path.exists()
    assert kept.exists()
    assert stat.S_ISSOCK(below.path.stat().st_mode)
    kept.unlink()
    await kubelet.shows("0", "0")
    again = await kubelet.plugin("a")
    await kubelet.shows("1", "1")
    assert again.calls == ["options", "list"]


@statement
async def test_a_restart_makes_another_kubelet_sock(kubelet: Kubelet) -> None:
    def identity() -> tuple[int, int]:
        status = (kubelet.sockets / "kubelet.sock").stat()
        return status.st_ino, status.st_ctime_ns

    before = identity()
    await kubelet.restart()
    assert identity() != before


@statement
async def test_a_plugin_that_stays_away_leaves_no_healthy_device_to_allocate(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    await plugin.stop()
    await kubelet.lists()
    reason, message = await kubelet.refused(await kubelet.pod(1))
    assert reason == "UnexpectedAdmissionError"
    assert message.removeprefix("Pod was rejected: ") == (
        "Allocate failed due to no healthy devices present; "
        f"cannot allocate unhealthy devices {kubelet.resource}, which is unexpected"
    )


@statement
async def test_a_key_removed_from_the_status_by_hand_is_written_again(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.shows("1", "1")
    removed = {kubelet.resource: None}
    code, answer = await kubelet.api.send(
        "PATCH",
        f"/api/v1/nodes/{kubelet.node.name}/status",
        {"status": {"capacity": removed, "allocatable": removed}},
        kind="application/merge-patch+json",
    )
    assert code == 200, answer
    plugin.send("a", "b")
    await kubelet.shows("2", "2")

"""Statements about a kubelet: its calls to a plugin for a container, and the status of pods."""

from typing import Any

from muster.pb import deviceplugin_pb2 as dp
from tests.worlds.kubelet_statements import (
    STAND_IN_CANNOT,
    Kubelet,
    since_1_36,
    statement,
    until,
    until_true,
)

REJECTED = "Pod was rejected: "


def because(message: str) -> str:
    """Return the reason in a pod's message."""
    return (
        message.removeprefix(REJECTED)
        .removeprefix("Allocate failed due to ")
        .removesuffix(", which is unexpected")
    )


@statement
async def test_each_container_is_a_call_of_its_own(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b", "c")
    await kubelet.lists("a", "b", "c")
    name = await kubelet.pod(1, 2)
    await kubelet.runs(name)
    assert [[len(ids) for ids in call] for call in plugin.allocations] == [[1], [2]]
    held = (await kubelet.holdings())[name]
    assert held == {"c0": plugin.allocations[0][0], "c1": plugin.allocations[1][0]}


@statement
async def test_an_error_is_word_for_word_in_the_pod_and_its_event(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    plugin.allocate_refusal = "no such thing: äöü, 'quoted'"
    await kubelet.lists("a")
    name = await kubelet.pod(1)
    reason, message = await kubelet.refused(name)
    text = f"rpc error: code = ResourceExhausted desc = {plugin.allocate_refusal}"
    assert (reason, because(message)) == ("UnexpectedAdmissionError", text)
    assert message.startswith(REJECTED)
    event = ("UnexpectedAdmissionError", message.removeprefix(REJECTED))
    await until("the event", lambda: kubelet.events(name), lambda events: event in events)
    assert plugin.allocations == [[["a"]]]


@statement
async def test_after_an_error_the_devices_are_free(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    plugin.allocate_refusal = "not now"
    await kubelet.lists("a")
    await kubelet.refused(await kubelet.pod(1))
    plugin.allocate_refusal = ""
    await kubelet.runs(await kubelet.pod(1))
    assert plugin.allocations == [[["a"]], [["a"]]]


@statement
async def test_an_answer_without_a_container_fails_the_pod(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    plugin.answers = []
    await kubelet.lists("a")
    reason, message = await kubelet.refused(await kubelet.pod(1))
    assert reason == "UnexpectedAdmissionError"
    assert because(message).rstrip() == "no containers return in allocation response"


@statement
async def test_of_two_answers_the_first_counts(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    plugin.answers = [dp.ContainerAllocateResponse(envs={"NUMBER": str(n)}) for n in (1, 2)]
    await kubelet.lists("a")
    await kubelet.runs(await kubelet.pod(1))


@statement
async def test_more_than_there_are_is_refused_with_the_counts(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.lists("a", "b")
    await kubelet.runs(await kubelet.pod(1))
    reason, message = await kubelet.refused(await kubelet.pod(2))
    assert reason == "UnexpectedAdmissionError"
    assert because(message) == (
        f"requested number of devices unavailable for {kubelet.resource}. "
        "Requested: 2, Available: 1"
    )
    assert len(plugin.allocations) == 1


@statement
async def test_of_a_resource_that_nobody_registered_the_kubelet_takes_no_notice(
    kubelet: Kubelet,
) -> None:
    name = await kubelet.pod(1)
    await kubelet.runs(name)
    assert name not in await kubelet.holdings()
    assert await kubelet.shown() == (None, None)


@statement
async def test_running_pods_outlive_the_health_of_their_device_and_the_plugin(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    name = await kubelet.pod(1)
    await kubelet.runs(name)
    plugin.send(a="Unhealthy")
    await kubelet.shows("1", "0")
    await plugin.stop()
    await kubelet.restart()
    await kubelet.shows("0", "0")
    assert (await kubelet.pod_status(name))["phase"] == "Running"
    await kubelet.holds(name, c0=["a"])
    assert plugin.allocations == [[["a"]]]


@statement
async def test_a_device_stays_with_its_pod_when_its_id_leaves_the_list_and_returns(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    name = await kubelet.pod(1)
    await kubelet.runs(name)
    plugin.send("b")
    await kubelet.lists("b")
    assert (await kubelet.holdings())[name] == {"c0": ["a"]}
    plugin.send("a")
    await kubelet.lists("a")
    _, message = await kubelet.refused(await kubelet.pod(1))
    assert because(message) == (
        f"requested number of devices unavailable for {kubelet.resource}. "
        "Requested: 1, Available: 0"
    )


@statement
async def test_after_a_restart_nothing_is_allocated_twice(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.lists("a", "b")
    name = await kubelet.pod(1)
    await kubelet.runs(name)
    (held,) = plugin.allocations[0]
    await kubelet.restart()
    again = await kubelet.plugin("a", "b")
    await kubelet.shows("2", "2")
    await kubelet.runs(await kubelet.pod(1))
    assert again.allocations == [[sorted({"a", "b"} - {*held})]]


@statement
async def test_a_later_container_gets_the_devices_of_an_init_container(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.lists("a", "b")
    init = kubelet.container("first", 1, "true")
    name = await kubelet.pod(1, init=[init])
    await kubelet.runs(name)
    assert len(plugin.allocations) == 2
    assert plugin.allocations[0] == plugin.allocations[1]
    assert (await kubelet.holdings())[name] == {"c0": plugin.allocations[1][0]}


@statement
async def test_a_sidecar_keeps_its_devices(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b")
    await kubelet.lists("a", "b")
    name = await kubelet.pod(1, init=[kubelet.container("side", 1, restartPolicy="Always")])
    await kubelet.runs(name)
    (side,), (app,) = plugin.allocations
    assert sorted(side + app) == ["a", "b"]
    assert (await kubelet.holdings())[name] == {"side": side, "c0": app}


@statement
async def test_a_preference_is_asked_for_only_where_it_is_offered(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b", "c", register=False)
    plugin.options = dp.DevicePluginOptions(get_preferred_allocation_available=True)
    plugin.prefers = ["c", "unknown", "b", "a"]
    # the options in Register do not count
    await kubelet.register(plugin)
    await kubelet.lists("a", "b", "c")
    await kubelet.runs(await kubelet.pod(3))
    (wish,) = plugin.preferences
    assert sorted(wish.available_deviceIDs) == ["a", "b", "c"]
    assert (list(wish.must_include_deviceIDs), wish.allocation_size) == ([], 3)
    assert plugin.allocations == [[["a", "b", "c"]]]
    silent = await kubelet.plugin("a", register=False, resource=f"{kubelet.resource}-silent")
    kubelet.resource += "-silent"
    await kubelet.register(silent, get_preferred_allocation_available=True)
    await kubelet.lists("a")
    await kubelet.runs(await kubelet.pod(1))
    assert (silent.preferences, silent.allocations) == ([], [[["a"]]])


@statement
async def test_a_preference_is_followed_and_a_short_one_is_filled_up(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", "b", "c", "d", register=False)
    plugin.options = dp.DevicePluginOptions(get_preferred_allocation_available=True)
    await kubelet.register(plugin)
    await kubelet.lists("a", "b", "c", "d")
    plugin.prefers = ["c", "d"]
    await kubelet.runs(await kubelet.pod(2))
    plugin.prefers = ["c", "c", "unknown"]
    await kubelet.runs(await kubelet.pod(1))
    assert plugin.allocations[0] == [["c", "d"]]
    assert plugin.allocations[1] in ([["a"]], [["b"]])


@statement
async def test_an_error_of_the_preference_fails_the_pod(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", register=False)
    plugin.options = dp.DevicePluginOptions(get_preferred_allocation_available=True)
    plugin.preference_refusal = "no idea"
    await kubelet.register(plugin)
    await kubelet.lists("a")
    reason, message = await kubelet.refused(await kubelet.pod(1))
    assert reason == "UnexpectedAdmissionError"
    assert because(message) == (
        "device plugin GetPreferredAllocation rpc failed with err: "
        "rpc error: code = ResourceExhausted desc = no idea"
    )


@statement
async def test_a_plugin_that_hangs_in_allocate_stops_every_new_pod_and_no_list(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    plugin.held.clear()
    hanging = await kubelet.pod(1)
    await until_true("a call", lambda: plugin.allocations)
    other = await kubelet.pod(0)
    plugin.send("a", "b")
    await kubelet.shows("2", "2")
    assert (await kubelet.pod_status(other))["phase"] == "Pending"
    plugin.held.set()
    await kubelet.runs(hanging)
    await kubelet.runs(other)


@statement
async def test_before_each_start_a_container_is_announced_if_the_plugin_wants_that(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a", register=False)
    plugin.options = dp.DevicePluginOptions(pre_start_required=True)
    await kubelet.register(plugin)
    await kubelet.lists("a")
    await kubelet.runs(await kubelet.pod(1))
    assert plugin.starts == [["a"]]


@statement
async def test_an_error_before_the_start_holds_the_container(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a", register=False)
    plugin.options = dp.DevicePluginOptions(pre_start_required=True)
    await kubelet.register(plugin)
    await kubelet.lists("a")
    plugin.start_refusal = "busy"
    waits = await kubelet.pod(1)
    status = await until(
        "a container that waits",
        lambda: kubelet.pod_status(waits),
        lambda status: _waiting(status).get("reason") == "CreateContainerConfigError",
    )
    assert _waiting(status)["message"] == (
        "device plugin PreStartContainer rpc failed with err: "
        "rpc error: code = ResourceExhausted desc = busy"
    )


def _waiting(status: dict[str, Any]) -> dict[str, str]:
    for container in status.get("containerStatuses", ()):
        waiting: dict[str, str] = container["state"].get("waiting", {})
        return waiting
    return {}


@statement
async def test_a_container_restarts_with_its_devices_without_another_allocate(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    name = await kubelet.pod(1, command=["sh", "-c", "sleep 0.2"])
    await until("a restart", lambda: kubelet.pod_status(name), _has_restarted)
    assert plugin.allocations == [[["a"]]]


@statement
async def test_a_container_restarts_from_the_cache_while_its_plugin_is_away(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    name = await kubelet.pod(1, command=["sh", "-c", "sleep 1"])
    await kubelet.runs(name)
    await plugin.stop()
    await until("a restart", lambda: kubelet.pod_status(name), _has_restarted)


@statement
async def test_a_container_that_is_announced_does_not_restart_while_its_plugin_is_away(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a", register=False)
    plugin.options = dp.DevicePluginOptions(pre_start_required=True)
    await kubelet.register(plugin)
    await kubelet.lists("a")
    name = await kubelet.pod(1, command=["sh", "-c", "sleep 1"])
    await kubelet.runs(name)
    await plugin.stop()
    status = await until(
        "a container that waits",
        lambda: kubelet.pod_status(name),
        lambda status: _waiting(status).get("reason") == "CreateContainerConfigError",
    )
    message = _waiting(status)["message"]
    assert message.startswith("device plugin PreStartContainer rpc failed with err: endpoint ")
    assert message.endswith(" has been stopped")
    assert not _has_restarted(status)


def _has_restarted(status: dict[str, Any]) -> bool:
    return any(container["restartCount"] for container in status.get("containerStatuses", ()))


@statement
async def test_a_container_gets_environment_devices_and_mounts_of_the_answer(
    kubelet: Kubelet,
) -> None:
    plugin = await kubelet.plugin("a")
    plugin.answers = [
        dp.ContainerAllocateResponse(
            envs={"TOY": "yes", "OURS": "plugin"},
            devices=[
                dp.DeviceSpec(container_path="/dev/toy", host_path="/dev/null", permissions="rw")
            ],
            mounts=[dp.Mount(container_path="/toys", host_path="/etc", read_only=True)],
        )
    ]
    await kubelet.lists("a")
    script = (
        'echo "$TOY $OURS" >> /dev/termination-log; '
        "test -c /dev/toy && echo device >> /dev/termination-log; "
        "test -f /toys/passwd && echo mount >> /dev/termination-log; "
        "touch /toys/x || echo read-only >> /dev/termination-log"
    )
    env = [{"name": "OURS", "value": "pod"}]
    name = await kubelet.pod(1, command=["sh", "-c", script], env=env)
    status = await until("the end", lambda: kubelet.pod_status(name), _last_words)
    assert _last_words(status).split() == ["yes", "pod", "device", "mount", "read-only"]


def _last_words(status: dict[str, Any]) -> str:
    """Return the termination message of the first container that has one."""
    for container in status.get("containerStatuses", ()):
        for state in (container["state"], container.get("lastState", {})):
            words: str = state.get("terminated", {}).get("message", "")
            if words:
                return words
    return ""


@since_1_36
async def test_the_health_of_a_device_is_in_the_status_of_its_pod(kubelet: Kubelet) -> None:
    plugin = await kubelet.plugin("a")
    await kubelet.lists("a")
    name = await kubelet.pod(1)
    await kubelet.runs(name)
    for health in ("Unhealthy", "Healthy"):
        plugin.send(a=health)
        wanted = [{"name": kubelet.resource, "resources": [{"resourceID": "a", "health": health}]}]
        await until(
            health,
            lambda: kubelet.pod_status(name),
            lambda status, wanted=wanted: (  # type: ignore[misc]
                status["containerStatuses"][0].get("allocatedResourcesStatus") == wanted
            ),
        )


def test_what_the_stand_in_cannot_do_are_statements_of_this_file() -> None:
    assert STAND_IN_CANNOT.keys() <= globals().keys()

"""Statements about a kubelet: its plugin watcher, the second way to register."""

from muster.pb import pluginregistration_pb2 as pr
from tests.worlds import device_plugin
from tests.worlds.kubelet_statements import Kubelet, statement, until_true


async def watched(kubelet: Kubelet, *ids: str) -> device_plugin.DevicePlugin:
    """Serve a plugin where the watcher finds it."""
    return await kubelet.plugin(*ids, folder=kubelet.registry, register=False)


@statement
async def test_a_socket_in_the_registry_is_registered_and_told_so(kubelet: Kubelet) -> None:
    plugin = await watched(kubelet, "a")
    await kubelet.shows("1", "1")
    assert plugin.calls == ["info", "options", "list"]
    await until_true("the result", lambda: plugin.statuses)
    assert plugin.statuses == [(True, "")]


@statement
async def test_a_plugin_of_another_kind_version_or_name_is_told_why(kubelet: Kubelet) -> None:
    name = kubelet.resource
    infos = [
        pr.PluginInfo(type="Toy", name=name, supported_versions=["v1beta1"]),
        pr.PluginInfo(type="DevicePlugin", name=name, supported_versions=["v1alpha", "v2"]),
        pr.PluginInfo(type="DevicePlugin", name="noslash", supported_versions=["v1beta1"]),
    ]
    plugins = [kubelet.unserved(folder=kubelet.registry) for _ in infos]
    for plugin, info in zip(plugins, infos, strict=True):
        plugin.info = info
        await kubelet.serve(plugin)
    await until_true("every result", lambda: all(plugin.statuses for plugin in plugins))
    socket = f"{kubelet.node.inside}/plugins_registry/{plugins[0].path.name}"
    invalid = "plugin validation failed with err: "
    version = "manager version, v1beta1, is not among plugin supported versions [v1alpha v2]"
    name = 'invalid name of device plugin socket: the ResourceName "noslash" is invalid'
    assert [plugin.statuses[0] for plugin in plugins] == [
        (False, f"RegisterPlugin error -- {text}")
        for text in (
            f"no handler registered for plugin type: Toy at socket {socket}",
            invalid + version,
            invalid + name,
        )
    ]


@statement
async def test_a_registration_that_failed_is_tried_again(kubelet: Kubelet) -> None:
    plugin = kubelet.unserved("a", folder=kubelet.registry)
    plugin.info.supported_versions[:] = ["v2"]
    await kubelet.serve(plugin)
    await until_true("a refusal", lambda: plugin.statuses)
    plugin.info.supported_versions[:] = ["v1beta1"]
    await kubelet.shows("1", "1")
    assert plugin.statuses[-1] == (True, "")


@statement
async def test_a_restarted_kubelet_finds_the_sockets_of_its_registry(kubelet: Kubelet) -> None:
    plugin = await watched(kubelet, "a")
    await kubelet.shows("1", "1")
    await kubelet.restart()
    await until_true("a second stream", lambda: len(plugin.streams) == 2)
    assert plugin.path.exists()
    await kubelet.shows("1", "1")


@statement
async def test_a_stream_that_ends_is_opened_again_when_the_socket_is_renamed(
    kubelet: Kubelet,
) -> None:
    plugin = await watched(kubelet, "a")
    await kubelet.shows("1", "1")
    plugin.streams[0].end()
    await kubelet.shows("1", "0")
    assert len(plugin.streams) == 1
    renamed = plugin.path.with_name(f"renamed-{plugin.path.name}")
    plugin.path.rename(renamed)
    try:
        await kubelet.shows("1", "1")
        assert plugin.calls == ["info", "options", "list"] * 2
    finally:
        renamed.unlink()


@statement
async def test_a_socket_that_leaves_the_registry_is_deregistered(kubelet: Kubelet) -> None:
    plugin = await watched(kubelet, "a")
    await kubelet.shows("1", "1")
    plugin.path.unlink()
    await until_true("the stream's end", plugin.streams[0].ended.is_set)
    await kubelet.shows("1", "0")


@statement
async def test_a_hidden_socket_is_ignored_and_one_in_a_folder_is_not(kubelet: Kubelet) -> None:
    hidden = kubelet.unserved("a", folder=kubelet.registry)
    hidden.path = hidden.path.with_name(f".{hidden.path.name}")
    await kubelet.serve(hidden)
    folder = kubelet.registry / "muster-statement"
    folder.mkdir(exist_ok=True)
    plugin = await kubelet.plugin("a", folder=folder, register=False)
    await kubelet.shows("1", "1")
    assert (hidden.calls, plugin.calls) == ([], ["info", "options", "list"])


@statement
async def test_the_endpoint_may_be_another_socket_than_that_of_the_registry(
    kubelet: Kubelet,
) -> None:
    served = await kubelet.plugin("a", folder=kubelet.node.directory, register=False)
    asked = kubelet.unserved(folder=kubelet.registry)
    asked.info.endpoint = f"{kubelet.node.inside}/{served.path.name}"
    await kubelet.serve(asked)
    await kubelet.shows("1", "1")
    assert (asked.calls, served.calls) == (["info"], ["options", "list"])

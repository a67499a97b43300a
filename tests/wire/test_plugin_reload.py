import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import yaml

from muster.local import kubelet as stand_in
from tests.worlds import plugin_process

ONE, TWO = "a.example/one", "a.example/two"


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    (path / "settings").mkdir()
    yield path
    shutil.rmtree(path)


def written(**counts: int) -> bytes:
    """Return settings with a resource for each name, with this number of ids."""
    resources = [
        {
            "name": f"a.example/{name}",
            "groups": [{"devices": [{"path": f"/dev/{path}"}], "count": counts[name]}],
        }
        for name, path in (("one", "null"), ("two", "zero"), ("three", "full"))
        if name in counts
    ]
    return orjson.dumps({"apiVersion": "muster.dev/v1", "resources": resources})


def mounted(root: Path, content: bytes) -> Path:
    """Write the file as from a ConfigMap: a link through another, which an update replaces."""
    folder = root / "settings"
    data = Path(tempfile.mkdtemp(dir=folder, prefix="..data-"))
    (data / "plugin.yaml").write_bytes(content)
    (folder / "..new").symlink_to(data.name)
    (folder / "..new").rename(folder / "..data")
    file = folder / "plugin.yaml"
    if not file.is_symlink():
        file.symlink_to("..data/plugin.yaml")
    return file


async def until_allocatable(kubelet: stand_in.Kubelet, **counts: int) -> None:
    await kubelet.until(
        lambda state: all(
            f"a.example/{name}" in state.resources
            and state.resources[f"a.example/{name}"].allocatable == count
            for name, count in counts.items()
        )
    )


def test_a_changed_configmap_is_applied_and_unchanged_resources_stay_registered(root: Path) -> None:
    async def story() -> None:
        file = mounted(root, written(one=1, two=1))
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file) as process,
        ):
            await until_allocatable(kubelet, one=1, two=1)
            mounted(root, written(one=3, three=2))
            entry = await process.said("configuration_applied")
            assert [entry[key] for key in ("added", "removed", "registered_again", "restart")] == [
                ["a.example/three"],
                [TWO],
                [],
                [],
            ]
            await process.said("registered", resource="a.example/three")
            assert process.log[-1]["reason"] == "configuration_changed"
            await until_allocatable(kubelet, one=3, two=0, three=2)
            assert kubelet.state().resources[ONE].registered == 1

    plugin_process.run(story)


def test_a_changed_registration_option_registers_the_resource_again(root: Path) -> None:
    async def story() -> None:
        file = mounted(root, written(one=1, two=1))
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file) as process,
        ):
            await until_allocatable(kubelet, one=1, two=1)
            changed = orjson.loads(written(one=1, two=1))
            changed["resources"][0]["preStart"] = True
            mounted(root, orjson.dumps(changed))
            entry = await process.said("configuration_applied")
            assert entry["registered_again"] == [ONE]
            await process.said("registered", resource=ONE, reason="configuration_changed")
            await until_allocatable(kubelet, one=1, two=1)
            assert kubelet.state().resources[TWO].registered == 1

    plugin_process.run(story)


def test_an_invalid_change_is_refused_and_the_old_configuration_stays(root: Path) -> None:
    async def story() -> None:
        file = mounted(root, written(one=1))
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file) as process,
        ):
            await until_allocatable(kubelet, one=1)
            mounted(root, b"resources: [{name: one, group: []}]")
            entry = await process.said("configuration_rejected")
            assert entry["problems"] == [
                f"{file}: resources[0].group: unknown key (value []); did you mean groups?",
                f"{file}: resources[0].groups: required but missing",
                f"{file}: resources[0].name: 'one' has no domain; write it as example.com/one",
            ]
            mounted(root, written(one=2))
            assert process.process.returncode is None
            process.process.send_signal(signal.SIGHUP)
            await process.said("configuration_applied")
            await until_allocatable(kubelet, one=2)

    plugin_process.run(story)


def test_a_restored_file_ends_the_refusal_and_the_same_mistake_is_reported_again(
    root: Path,
) -> None:
    async def story() -> None:
        file = plugin_process.written(root / "c.json", plugin_process.resource(ONE, "/dev/null"))
        good = file.read_bytes()
        async with (
            stand_in.Kubelet(directory=root, node="node-a"),
            plugin_process.plugin(root, file) as process,
        ):
            await process.said("listening")
            for times in (1, 2):
                plugin_process.written(file, plugin_process.resource("no-domain", "/dev/null"))
                entry = await process.said("configuration_rejected")
                _, metrics = await process.asked("/metrics")
                assert f"muster_plugin_configurations_refused_total {times}.0" in metrics
                assert "muster_plugin_problems 1.0" in metrics
                assert "muster_plugin_configuration_refused_timestamp_seconds 0.0\n" not in metrics
                file.write_bytes(good)
                applied = await process.said("configuration_applied")
                assert applied["config_hash"] == entry["active_configuration"]
                assert [applied[key] for key in ("added", "removed", "restart")] == [[], [], []]
                _, metrics = await process.asked("/metrics")
                assert "muster_plugin_configuration_refused_timestamp_seconds 0.0\n" in metrics
                assert (
                    'muster_plugin_checker_success_timestamp_seconds{checker="devices"}' in metrics
                )
            await process.stop()

    plugin_process.run(story)


def test_another_plugins_file_can_be_used_unchanged(root: Path) -> None:
    async def story() -> None:
        file = root / "conf.yaml"
        file.write_text("- {devicematch: ^null$, nummaxdevices: 20}\n")
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file, "--config-format", "smarter") as process,
        ):
            await process.said("registered", resource="smarter-devices/null")
            node = await kubelet.until(
                lambda state: state.resources["smarter-devices/null"].allocatable == 20
            )
            assert [*node.resources] == ["smarter-devices/null"]

    plugin_process.run(story)


def test_a_second_plugin_for_the_same_resource_refuses_to_start(root: Path) -> None:
    async def story() -> None:
        file = mounted(root, written(one=1))
        async with (
            stand_in.Kubelet(directory=root, node="node-a"),
            plugin_process.plugin(root, file) as first,
        ):
            await first.said("registered")
            async with plugin_process.plugin(root, file) as second:
                owner = f"{ONE} ({socket.gethostname()}, process {first.process.pid})"
                assert await second.ended() == (
                    2,
                    (
                        f"muster-plugin: another plugin on this node serves {owner}; stop that "
                        "plugin first, or increase handover_s to wait longer for it (now 0 s)\n"
                    ),
                )

    plugin_process.run(story)


def test_a_second_plugin_of_another_name_waits_for_the_end_of_the_first(root: Path) -> None:
    async def story() -> None:
        file = mounted(root, written(one=1))
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file, MUSTER_PLUGIN__NAME="other") as first,
        ):
            await first.said("registered")
            waits = plugin_process.plugin(root, file, MUSTER_PLUGIN__HANDOVER_S="20")
            async with waits as second:
                await second.said("waiting_for_other_plugin")
                first.process.terminate()
                await second.said("registered")
                await until_allocatable(kubelet, one=1)
                assert kubelet.state().resources[ONE].streams_open == 1

    plugin_process.run(story)


def test_check_prints_the_configuration_of_this_node_and_refuses_what_the_start_refuses(
    root: Path,
) -> None:
    """It prints the rules of this node, found by NODE_NAME, and not those of other nodes."""

    async def checked(file: Path, **environment: str) -> tuple[int | None, str, str]:
        async with plugin_process.plugin(root, file, "--check", **environment) as process:
            output, errors = await process.process.communicate()
            return process.process.returncode, output.decode(), errors.decode()

    async def story() -> None:
        group = {"devices": [{"path": "/dev/null"}], "count": 2}
        here = {"match": "node-*", "resources": [{"name": ONE, "groups": [group]}]}
        there = {"match": "edge-*", "resources": [{"name": TWO, "groups": [group]}]}
        file = mounted(root, orjson.dumps({"nodes": [here, there]}))
        code, printed, problem = await checked(file)
        configuration = yaml.safe_load(printed)
        assert (code, problem) == (0, "")
        assert (configuration["node"], configuration["nodes"]) == ("node-a", [])
        assert configuration["resources"] == [{"name": ONE, "groups": [group]}]

        code, printed, problem = await checked(file, NODE_NAME="No Name")
        assert (code, printed) == (2, "")
        assert problem.startswith("muster-plugin: node: 'No Name' (from NODE_NAME) is not a Kube")

        (root / "device-plugins").rmdir()
        code, printed, problem = await checked(file)
        assert (code, printed) == (2, "")
        assert problem.startswith("muster-plugin: kubelet.directory: ")

    plugin_process.run(story)


def test_what_differs_from_the_peer_is_in_the_log_of_the_start(root: Path) -> None:
    async def story() -> None:
        file = mounted(root, b"[{devicematch: nul, nummaxdevices: 2}]")
        async with plugin_process.plugin(root, file, "--config-format", "smarter") as process:
            entry = await process.said("import_difference")
            assert entry["file"] == str(file)
            assert entry["difference"].startswith("[0]: devicematch 'nul' is not anchored: ")

    plugin_process.run(story)


def test_the_variables_of_nvidias_plugin_are_honoured_or_refused_at_the_start(root: Path) -> None:
    async def checked(**environment: str) -> tuple[int | None, str, str]:
        file = mounted(root, b"{version: v1, flags: {migStrategy: none, gdsEnabled: true}}")
        options = ("--config-format", "nvidia", "--check")
        async with plugin_process.plugin(root, file, *options, **environment) as process:
            output, errors = await process.process.communicate()
            return process.process.returncode, output.decode(), errors.decode()

    async def story() -> None:
        honoured = {"MIG_STRATEGY": "mixed", "PASS_DEVICE_SPECS": "true"}
        code, printed, problem = await checked(**honoured)
        assert (code, problem) == (0, "")
        gpus = yaml.safe_load(printed)["gpus"]
        assert gpus == {"migStrategy": "mixed", "given": {"deviceSpecs": True, "gds": True}}

        refused = {"CDI_FEATURE_FLAGS": "a", "CONFIG_FILE": "/config/config.yaml"}
        code, printed, problem = await checked(**refused)
        assert (code, printed, problem.splitlines()) == (
            2,
            "",
            [
                (
                    "muster-plugin: CONFIG_FILE: '/config/config.yaml' is not supported; "
                    "pass this file with --config"
                ),
                (
                    "muster-plugin: CDI_FEATURE_FLAGS: 'a' is not supported; muster writes no CDI "
                    "spec for GPUs; pass the option to nvidia-ctk cdi generate"
                ),
            ],
        )

    plugin_process.run(story)

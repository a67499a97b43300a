from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from muster.service import sections, settings
from muster_plugin.config import files, resources
from muster_plugin.config import settings as config_settings
from tests.worlds import manifests


def resource(name: str, path: str) -> resources.Resource:
    return resources.Resource(
        name=name, groups=(resources.Group(devices=(resources.Entry(path=path),)),)
    )


def load(tmp_path: Path, text: str) -> config_settings.Settings:
    file = tmp_path / "plugin.yaml"
    file.write_text(text)
    return settings.load(
        config_settings.Settings, prefix="MUSTER_PLUGIN", file=file, environment={}
    )


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(settings.BadSettings) as caught:
        load(tmp_path, text)
    return [
        expected.removeprefix(f"{tmp_path}/plugin.yaml: ") for expected in caught.value.problems
    ]


def test_a_resource_needs_only_a_name_and_a_path(tmp_path: Path) -> None:
    result = load(
        tmp_path,
        "resources: [{name: smarter-devices/fuse, groups: [{devices: [{path: /dev/fuse}]}]}]",
    )
    assert result.resources == (resource("smarter-devices/fuse", "/dev/fuse"),)
    assert result.kubelet == config_settings.Kubelet(directory="/var/lib/kubelet")


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_the_configuration_of_the_plugin_is_picked_from_all_that_an_overlay_renders(
    overlay: str,
) -> None:
    text = manifests.file_in(overlay, "muster-plugin", "plugin.yaml")
    alone = files.read(text.encode(), source="FILE", written_for=config_settings.Format.MUSTER)
    rendered = manifests.rendered(overlay).encode()
    assert alone == files.read(rendered, source="FILE", written_for=config_settings.Format.MUSTER)


def test_of_several_configurations_of_plugins_none_is_picked() -> None:
    maps = [
        {"kind": "ConfigMap", "metadata": {"name": name}, "data": {key: text}}
        for name, key, text in (
            ("nats", "nats.conf", "jetstream {"),
            ("health", "health.yaml", "log: {level: info}"),
            ("a", "plugin.yaml", "resources: []"),
            ("b", "plugin.yaml", "resources: []"),
        )
    ]
    with pytest.raises(settings.BadSettings) as refused:
        files.read(
            yaml.safe_dump_all(maps).encode(),
            source="FILE",
            written_for=config_settings.Format.MUSTER,
        )
    assert refused.value.problems == [
        (
            "FILE: several configurations: plugin.yaml of ConfigMap a, plugin.yaml of ConfigMap "
            "b; give one file"
        )
    ]


def test_all_errors_are_reported_at_once_with_their_keys(tmp_path: Path) -> None:
    text = """
    heartbeat: {interval_s: 0}
    kublet: {directory: /x}
    resources:
      - {name: noslash, groups: [{devices: [{path: dev/kvm, permissions: rx}]}]}
      - {name: a.example/b, groups: [], cuont: 2}
      - {name: a.example/c, groups: [{devices: [{path: /dev/fuse}]}]}
      - {name: a.example/d, groups: [{devices: [{path: /dev/fuse}]}]}
    simulated_gpus: {count: 0}
    """
    assert problems(tmp_path, text) == [
        "heartbeat.interval_s: expected a number of at least 0.1, found 0",
        "kublet: unknown key (value {directory: '/x'}); did you mean kubelet?",
        "resources[0].groups[0].devices[0].path: 'dev/kvm' is not an absolute path",
        ("resources[0].groups[0].devices[0].permissions: 'rx' is not a combination of r, w and m"),
        "resources[0].name: 'noslash' has no domain; write it as example.com/noslash",
        "resources[1].groups: expected a list of at least 1 item, found 0",
        (
            "resources[1].cuont: unknown key (value 2); known keys: name, groups, perMatch, env, "
            "expect, checks, cdi, preStart, grace_s, registration"
        ),
        "simulated_gpus.count: expected a whole number of at least 1, found 0",
        (
            "resources[3].groups[0].devices[0]: a.example/d would also advertise nodes of "
            "a.example/c (resources[2].groups[0].devices[0]); exclude them there, or write "
            "shared: true in one of these entries"
        ),
    ]


def test_nothing_to_advertise_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, "node: node-a") == [
        "nothing to do: set resources, gpus, simulated_gpus or watch (enabled: true)"
    ]


def test_two_resources_of_one_name_are_refused(tmp_path: Path) -> None:
    text = """
    resources: [{name: nvidia.com/gpu, groups: [{devices: [{path: /dev/fuse}]}]}]
    simulated_gpus: {}
    """
    assert problems(tmp_path, text) == [
        "resources: two resources are named nvidia.com/gpu; the kubelet would keep only one"
    ]


def test_a_directory_too_deep_for_a_socket_path_is_refused(tmp_path: Path) -> None:
    directory = "/" + "d" * 60
    text = f"""
    kubelet: {{directory: {directory}}}
    resources: [{{name: smarter-devices/fuse, groups: [{{devices: [{{path: /dev/fuse}}]}}]}}]
    """
    path = f"{directory}/plugins_registry/muster-smarter-devices_fuse-00000000-99999.sock"
    assert problems(tmp_path, text) == [
        (
            f"kubelet.directory: the path of the socket of smarter-devices/fuse can have 126 bytes "
            f"({path}), and Linux allows 107; shorten the directory or the name of the resource"
        )
    ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("node.kubernetes.io/x", "name: 'node.kubernetes.io/x' is in Kubernetes' own domain"),
        ("requests.a/x", "name: 'requests.a/x' starts with 'requests.', which quotas use"),
        ("A.com/x", "name: 'A.com' is not a lower-case DNS name of at most 244 characters"),
        (
            "a.com/-x",
            (
                "name: '-x' must have 1 to 63 of A-Z a-z 0-9 - _ . and begin and end with a letter"
                " or digit"
            ),
        ),
    ],
)
def test_what_the_kubelet_would_refuse_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        resource(name, "/dev/fuse")
    assert str(caught.value) == problem


DOMAINS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z]{1,20}){0,8}", fullmatch=True)
SHORTS = st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", fullmatch=True)
NAMES = st.builds("{}/{}".format, DOMAINS, SHORTS)


@given(NAMES, NAMES)
def test_socket_names_fit_the_usual_directory_and_differ_by_resource(item: str, two: str) -> None:
    name = config_settings.endpoint(item, process="0123cdef", serial=99_999)
    assert len(f"/var/lib/kubelet/device-plugins/{name}") <= 107
    assert "/" not in name
    assert (name == config_settings.endpoint(two, process="0123cdef", serial=99_999)) == (
        item == two
    )


def test_what_is_reported_of_a_nodes_devices_makes_its_hash_and_nothing_else_does() -> None:
    entry = config_settings.Settings(resources=(resource("a.com/x", "/dev/x"),))
    log = msgspec.structs.replace(entry, log=sections.Log(level=sections.LogLevel.DEBUG))
    elsewhere = msgspec.structs.replace(
        entry,
        nodes=(
            config_settings.NodeOverride(match="n2", resources=(resource("a.com/y", "/dev/y"),)),
        ),
    )
    others = config_settings.Settings(resources=(resource("a.com/x", "/dev/y"),))
    simulated = msgspec.structs.replace(
        entry, simulated_gpus=config_settings.SimulatedGpus(count=1)
    )
    item = entry.hash_for("n1")
    assert (log.hash_for("n1"), elsewhere.hash_for("n1")) == (item, item)
    assert (
        len({item, others.hash_for("n1"), simulated.hash_for("n1"), elsewhere.hash_for("n2")}) == 4
    )


@pytest.mark.parametrize(
    ("before", "after", "restart"),
    [
        ("gpus: {}", "gpus: {library: /a}", ("gpus.library",)),
        ("gpus: {library: /a}", "gpus: {library: /a, migStrategy: single}", ()),
        ("{gpus: {}, handover_s: 1}", "{gpus: {}, handover_s: 2}", ("handover_s",)),
        (
            "nodes: [{match: n1, gpus: {}}]",
            "nodes: [{match: n1, gpus: {library: /a}}]",
            ("gpus.library",),
        ),
        ("nodes: [{match: n2, gpus: {}}]", "nodes: [{match: n2, gpus: {library: /a}}]", ()),
        (
            "{gpus: {library: /a}, nodes: [{match: n1, gpus: {}}]}",
            "{gpus: {library: /b}, nodes: [{match: n1, gpus: {}}]}",
            (),
        ),
    ],
)
def test_a_restart_is_needed_for_what_a_node_reads_only_at_startup(
    before: str, after: str, restart: tuple[str, ...], tmp_path: Path
) -> None:
    earlier, later = (load(tmp_path, text) for text in (before, after))
    assert later.restart_needed_for(earlier, "n1") == restart

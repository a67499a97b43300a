"""The command `muster config`, as people run it: what it prints, where, and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from muster.cli import registry
from muster_plugin.cli import configure
from muster_plugin.model import advertised
from tests.worlds import muster_command

FUSE = "apiVersion: muster.dev/v1\nresources: [{name: a.b/fuse, groups: [%s]}]\n"
GROUP = "resources[0].groups[0]"
DEVICES = "{devices: [{path: /dev/fuse}], count: 20}"


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    return muster_command.muster("config", *arguments, stdin=stdin)


def test_a_file_is_imported_and_the_result_can_be_used(tmp_path: Path) -> None:
    conf = tmp_path / "conf.yaml"
    conf.write_text("- {devicematch: ^fuse$, nummaxdevices: 20}\n")
    code, printed, errors = run("import", "--from", "smarter", str(conf))
    assert (code, printed.splitlines()[:3]) == (
        0,
        ["apiVersion: muster.dev/v1", "resources:", "- name: smarter-devices/*"],
    )
    assert all(line.startswith("muster config: difference: ") for line in errors.splitlines())
    assert run("validate", "-", stdin=printed) == (0, "-: can be used; 1 resource\n", "")


def test_an_import_that_loses_something_writes_nothing_unless_that_is_accepted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    conf = tmp_path / "conf.yaml"
    conf.write_text("- {devicematch: ^fuse$, nummaxdevices: 20}\n- {devicematch: nvidia-gpu}\n")
    lost = [
        "muster config: Lost: 1",
        "muster config:   [1]: Jetson GPUs (/sys/devices/gpu.N) have no device node",
    ]
    refused = "muster config: nothing is written; --accept-losses writes the result anyway"
    command = ("import", "--from", "smarter", str(conf))
    code, printed, errors = called(capfd, *command)
    assert (code, printed, errors.splitlines()[-3:]) == (1, "", [*lost, refused])
    assert all(line.startswith("muster config: ") for line in errors.splitlines())
    code, printed, errors = called(capfd, *command, "--accept-losses")
    assert (code, printed.splitlines()[0]) == (0, "apiVersion: muster.dev/v1")
    assert errors.splitlines()[-2:] == lost


def test_the_command_and_each_sub_command_have_help() -> None:
    assert run("import", "--help")[1].startswith("Usage: muster config import")
    assert run()[1].startswith("Usage: muster config COMMAND")


def called(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = registry.call("config", *arguments)
    sys.stdout.flush()
    return code, *capfd.readouterr()


def test_every_problem_is_one_line_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text(FUSE % "{devices: [{path: dev/fuse}], cuont: 1}")
    code, printed, errors = called(capfd, "validate", str(file))
    assert (code, printed, errors.splitlines()) == (
        2,
        "",
        [
            f"muster config: {file}: {GROUP}.devices[0].path: 'dev/fuse' is not an absolute path",
            f"muster config: {file}: {GROUP}.cuont: unknown key (value 1); did you mean count?",
        ],
    )


def test_the_configuration_of_one_node_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    more = "nodes: [{match: {zone: north}, resources: [{name: a.b/kvm, groups: [%s]}]}]"
    kvm = more % "{devices: [{path: /dev/kvm}]}"
    file.write_text(FUSE % DEVICES + kvm)
    fuse = "apiVersion: muster.dev/v1\nresources:\n- name: a.b/fuse\n  groups:\n  - devices:\n"
    fuse += "    - path: /dev/fuse\n    count: 20\n"
    both = fuse + "- name: a.b/kvm\n  groups:\n  - devices:\n    - path: /dev/kvm\n"
    assert called(capfd, "show", str(file), "--node", "a") == (0, fuse, "")
    assert called(capfd, "show", str(file), "--label", "zone=north") == (0, both, "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["validate", "/absent"], "/absent: No such file or directory"),
        (["validate", "/dev"], "/dev: Is a directory"),
        (["validate", "/dev/zero"], "/dev/zero: larger than 1048576 bytes"),
        (["show", "a\0b"], "a\N{REPLACEMENT CHARACTER}b: embedded null byte"),
        (["show", "FILE", "--label", "zone"], "--label: 'zone' is not KEY=VALUE"),
        (["show", "FILE", "--kubelet-directory", "x"], "--kubelet-directory: 'x' is not an abs"),
        (
            ["show", "FILE", "--kubelet-directory", "/" + 80 * "x"],
            "--kubelet-directory: the pa",
        ),
        (["show", "FILE", "--node", "A_B"], "--node: 'A_B' is not a Kubernetes node name"),
        (
            ["show", "FILE", "--domain", "a.b"],
            "--domain: applies only to resources of generic-device-plugin",
        ),
        (
            ["import", "--from", "nvidia", "--default", "a", "FILE"],
            "--default: FILE has only one configuration",
        ),
        (
            ["import", "--from", "smarter", "--default", "a", "FILE"],
            "--default: applies only to configurations of NVIDIA's plugin",
        ),
        (
            ["show", "FILE", "--default", "a"],
            "--default: applies only to configurations of NVIDIA's plugin",
        ),
        (
            ["validate", "FILE", "--format", "nvidia", "--default", "a"],
            "--default: FILE has only one configuration",
        ),
        (["import", "--from", "nvidia", "FILE"], "FILE: version: unknown version: 'v9'"),
    ],
    ids=lambda given: str(given)[:20].replace("\0", "0"),
)
def test_each_unusable_input_is_reported_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text("version: v9" if "nvidia" in arguments else FUSE % DEVICES)
    words = [str(file) if word == "FILE" else word for word in arguments]
    code, printed, errors = called(capfd, *words)
    assert (code, printed, errors.count("\n")) == (2, "", 1)
    assert errors.replace(str(file), "FILE").startswith(f"muster config: {problem}")


NODES = f"nodes: [{{match: edge-*, resources: [{{name: a.b/fuse, groups: [{DEVICES}]}}]}}]"


@pytest.mark.parametrize(
    ("text", "arguments", "summary"),
    [
        (FUSE % DEVICES, [], "1 resource"),
        (
            NODES,
            [],
            "nothing by default; to show a node with overrides, use `show` with --node or --label",
        ),
        (NODES, ["--node", "a"], "nothing on a"),
        (NODES, ["--node", "edge-1"], "1 resource on edge-1"),
        ("gpus: {}", [], "GPUs"),
        ("gpus: {}\n" + FUSE % DEVICES, [], "1 resource and GPUs"),
    ],
)
def test_a_usable_file_is_summed_up_for_its_nodes(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
    summary: str,
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text(text)
    printed = called(capfd, "validate", str(file), *arguments)
    assert printed == (0, f"{file}: can be used; {summary}\n", "")


def test_a_node_without_configuration_is_shown_as_such(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text(NODES)
    for option in ([], ["--matches"]):
        printed = called(capfd, "show", str(file), "--node", "a", *option)
        assert printed == (0, "# nothing on this node\n", "")


def test_the_devices_of_this_machine_that_the_rules_match_are_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    absent = "{name: a.b/absent, groups: [{devices: [{path: /dev/absent}]}]}"
    null = "{name: a.b/null, groups: [{devices: [{path: /dev/null}], count: 3}]}"
    file.write_text(f"resources: [{absent}, {null}]")
    assert called(capfd, "show", str(file), "--matches") == (
        0,
        (
            "RESOURCE    DEVICE             GIVES\n"
            "a.b/absent  -                  no device\n"
            "a.b/null    null-0 and 2 more  /dev/null\n"
        ),
        "",
    )


def test_the_gpus_that_the_rules_match_are_shown_or_why_there_are_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    sharing = "{resources: [{name: nvidia.com/gpu, replicas: 4, devices: [0]}]}"
    file.write_text(f"gpus: {{sharing: {sharing}}}\nsimulated_gpus: {{count: 2, product: H100}}\n")
    first, other = (advertised.gpu_uuid("n1", index) for index in range(2))
    code, printed, errors = called(capfd, "show", str(file), "--matches", "--node", "n1")
    rows = [line.split(None, 1) for line in printed.splitlines()]
    assert (code, errors, rows) == (
        0,
        "",
        [
            ["RESOURCE", f"{'DEVICE':{len(first) + 14}}  GIVES"],
            *sorted(
                [
                    ["nvidia.com/gpu", f"{first}::0 and 3 more  GPU 0, H100"],
                    ["nvidia.com/gpu", f"{other:{len(first) + 14}}  GPU 1, H100"],
                ]
            ),
        ],
    )
    file.write_text("gpus: {library: /nowhere/libnvidia-ml.so.1}")
    # in a separate process: a library stays loaded
    code, printed, errors = run("show", str(file), "--matches")
    assert (code, printed.splitlines()[1:]) == (0, ["nvidia.com/gpu  -       no device"])
    assert errors.startswith("muster config: no GPU can be used (no_library): ")


def test_some_nodes_can_have_no_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text(f"gpus: {{}}\n{FUSE % DEVICES}nodes: [{{match: mps-*, gpus: null}}]\n")
    for node, summary in {"mps-1": "1 resource", "a": "1 resource and GPUs"}.items():
        printed = called(capfd, "validate", str(file), "--node", node)
        assert printed == (0, f"{file}: can be used; {summary} on {node}\n", "")


def test_text_that_is_no_xid_is_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text(
        "gpus: {health: {disable: '94,lots'}}\n"
        "nodes: [{match: a-*, gpus: {health: {enable: xid79}}}]\n"
    )
    _, _, errors = called(capfd, "validate", str(file))
    warning = f"muster config: {file}: warning:"
    assert errors.splitlines() == [
        f"{warning} gpus.health.disable: 'lots' is not an XID; ignored",
        f"{warning} nodes[0].gpus.health.enable: 'xid79' is not an XID; ignored",
    ]
    _, _, errors = called(capfd, "show", str(file), "--node", "a-1")
    assert errors.splitlines() == [
        f"muster config: {file}: warning: gpus.health.enable: 'xid79' is not an XID; ignored"
    ]


def test_a_valid_pattern_that_can_match_nothing_is_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    entries = [
        "{regex: '^/dev/video', exclude: ['/dev/video[!0]']}",
        "{path: '/dev/tty{USB,ACM}*'}",
        r"{path: '/dev/a\{b,c}'}",
    ]
    file.write_text(FUSE % ", ".join(f"{{devices: [{entry}]}}" for entry in entries))
    code, _, errors = called(capfd, "validate", str(file))
    here = f"muster config: {file}: warning: resources[0].groups"
    assert (code, errors.splitlines()) == (
        0,
        [
            (
                f"{here}[0].devices[0].regex: '^/dev/video' matches nothing: it is compared with "
                "the path below /dev; write '^video'"
            ),
            (
                f"{here}[0].devices[0].exclude[0]: '/dev/video[!0]': ! in a set is an ordinary "
                "character; write [^...] to negate it"
            ),
            (
                f"{here}[1].devices[0].path: '/dev/tty{{USB,ACM}}*': braces are not alternatives "
                "here; write one entry for each"
            ),
        ],
    )


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("[{devicematch: ^a$, nummaxdevices: 1}]", "smarter"),
        ("devices: [{name: aa, groups: []}]", "generic"),
        ("{version: v1, flags: {migStrategy: none}}", "nvidia"),
    ],
)
def test_another_plugins_file_is_recognised(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str, peer: str
) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text(text)
    code, _, errors = called(capfd, "validate", str(file))
    hint = f"{file}: this looks like {peer}'s configuration; try --format {peer}"
    assert (code, errors.splitlines()[-1]) == (2, f"muster config: {hint}")


def test_a_pipe_of_the_shell_can_be_the_file() -> None:
    reading, writing = os.pipe()
    os.write(writing, (FUSE % DEVICES).encode())
    os.close(writing)
    done = subprocess.run(
        [sys.executable, "-m", "muster.cli", "config", "validate", f"/dev/fd/{reading}"],
        pass_fds=[reading],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    os.close(reading)
    expected = f"/dev/fd/{reading}: can be used; 1 resource\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_the_schema_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    code, printed, errors = called(capfd, "schema")
    assert (code, errors) == (0, "")
    assert json.loads(printed) == json.loads(json.dumps(configure.schema()))


def test_a_daemonset_is_printed_for_each_label_value_with_what_to_add_to_other_settings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rules, manifests = tmp_path / "muster.yaml", tmp_path / "daemonset.yaml"
    rules.write_text("gpus: {}\nnodes: [{match: {config: t4}, gpus: {placement: packed}}]")
    source = Path(__file__).parents[2] / "k8s" / "base" / "plugin.yaml"
    manifests.write_bytes(source.read_bytes())
    code, printed, errors = called(capfd, "daemonsets", str(rules), str(manifests))
    account, *made = yaml.safe_load(printed)["items"]
    assert account in yaml.safe_load_all(source.read_bytes()), "the rest is unchanged"
    names = [each["metadata"]["name"] for each in made]
    assert (code, names) == (0, ["muster-plugin", "muster-plugin-t4"])
    where = "namespace: muster, daemonset: muster-plugin-t4"
    assert errors.splitlines() == [
        f"muster config: add to health's cluster.plugins: {{plugin: device-plugin-t4, {where}}}",
        "muster config: set the gate's variable MUSTER_GATE__PLUGINS to '[\"device-plugin-t4\"]'",
    ]
    assert run("daemonsets", str(rules), "-", stdin=source.read_text())[:2] == (0, printed)
    code, printed, errors = called(capfd, "daemonsets", str(rules), str(rules))
    problem = "found 0 DaemonSets that run muster_plugin; expected one"
    assert (code, printed, errors) == (2, "", f"muster config: {rules}: {problem}\n")
    rules.write_text("gpus: {}")
    code, printed, errors = called(capfd, "daemonsets", str(rules), str(manifests))
    problem = "nodes: no override matches by a label, so one DaemonSet is enough"
    assert (code, printed, errors) == (2, "", f"muster config: {rules}: {problem}\n")

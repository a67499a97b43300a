"""The command `muster config`, as people run it: what it prints, where, and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.cli import registry
from muster_plugin.cli import configure
from muster_plugin.model import names

FUSE = "apiVersion: muster.dev/v1\nresources: [{name: a.b/fuse, groups: [%s]}]\n"
GROUP = "resources[0].groups[0]"
DEVICES = "{devices: [{path: /dev/fuse}], count: 20}"


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "muster.cli", "config", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_file_is_imported_and_the_result_can_be_used(tmp_path: Path) -> None:
    conf = tmp_path / "conf.yaml"
    conf.write_text("- {devicematch: ^fuse$, nummaxdevices: 20}\n")
    code, printed, told = run("import", "--from", "smarter", str(conf))
    assert (code, printed.splitlines()[:3]) == (
        0,
        ["apiVersion: muster.dev/v1", "resources:", "- name: smarter-devices/*"],
    )
    assert all(line.startswith("muster config: difference: ") for line in told.splitlines())
    assert run("validate", "-", stdin=printed) == (0, "-: can be used; 1 resource\n", "")


def test_help_is_given_for_the_command_and_each_of_its_commands() -> None:
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
    code, printed, told = called(capfd, "validate", str(file))
    assert (code, printed, told.splitlines()) == (
        2,
        "",
        [
            f"muster config: {file}: {GROUP}.devices[0].path: 'dev/fuse' is not an absolute path",
            f"muster config: {file}: {GROUP}.cuont: unknown key (value 1); did you mean count?",
        ],
    )


def test_what_holds_on_one_node_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
            "--kubelet-directory: the so",
        ),
        (["show", "FILE", "--node", "A_B"], "--node: 'A_B' is not a Kubernetes node name"),
        (["show", "FILE", "--domain", "a.b"], "--domain: only generic's resources take it"),
        (["import", "--from", "nvidia", "FILE"], "FILE: version: unknown version: 'v9'"),
    ],
    ids=lambda given: str(given)[:20].replace("\0", "0"),
)
def test_what_cannot_be_used_is_said_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text("version: v9" if "nvidia" in arguments else FUSE % DEVICES)
    given = [str(file) if word == "FILE" else word for word in arguments]
    code, printed, told = called(capfd, *given)
    assert (code, printed, told.count("\n")) == (2, "", 1)
    assert told.replace(str(file), "FILE").startswith(f"muster config: {problem}")


NODES = f"nodes: [{{match: edge-*, resources: [{{name: a.b/fuse, groups: [{DEVICES}]}}]}}]"


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (FUSE % DEVICES, [], "1 resource"),
        (NODES, [], "nothing on every node; more on some: --node and --label show which"),
        (NODES, ["--node", "a"], "nothing on a"),
        (NODES, ["--node", "edge-1"], "1 resource on edge-1"),
        ("gpus: {}", [], "GPUs"),
        ("gpus: {}\n" + FUSE % DEVICES, [], "1 resource and GPUs"),
    ],
)
def test_what_can_be_used_is_counted_where_it_holds(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
    said: str,
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text(text)
    told = called(capfd, "validate", str(file), *arguments)
    assert told == (0, f"{file}: can be used; {said}\n", "")


def test_a_node_on_which_nothing_holds_is_shown_as_such(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text(NODES)
    for option in ([], ["--matches"]):
        told = called(capfd, "show", str(file), "--node", "a", *option)
        assert told == (0, "# nothing on this node\n", "")


def test_what_the_rules_mean_on_this_machine_is_shown(
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
            "a.b/absent  -                  nothing is there\n"
            "a.b/null    null-0 and 2 more  /dev/null\n"
        ),
        "",
    )


def test_which_gpus_the_rules_mean_is_shown_or_why_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    sharing = "{resources: [{name: nvidia.com/gpu, replicas: 4, devices: [0]}]}"
    file.write_text(f"gpus: {{sharing: {sharing}}}\nsimulated_gpus: {{count: 2, product: H100}}\n")
    first, other = (names.gpu_uuid("n1", index) for index in range(2))
    code, printed, told = called(capfd, "show", str(file), "--matches", "--node", "n1")
    rows = [line.split(None, 1) for line in printed.splitlines()]
    assert (code, told, rows) == (
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
    # in a process of its own: a library that was loaded stays
    code, printed, told = run("show", str(file), "--matches")
    assert (code, printed.splitlines()[1:]) == (0, ["nvidia.com/gpu  -       nothing is there"])
    assert told.startswith("muster config: no GPU can be used: no_library: ")


def test_words_that_are_no_xid_are_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    file.write_text(
        "gpus: {health: {disable: '94,lots'}}\n"
        "nodes: [{match: a-*, gpus: {health: {enable: xid79}}}]\n"
    )
    _, _, told = called(capfd, "validate", str(file))
    warning = f"muster config: {file}: warning:"
    assert told.splitlines() == [
        f"{warning} gpus.health.disable: 'lots' is not an XID; ignored",
        f"{warning} nodes[0].gpus.health.enable: 'xid79' is not an XID; ignored",
    ]
    _, _, told = called(capfd, "show", str(file), "--node", "a-1")
    assert told.splitlines() == [
        f"muster config: {file}: warning: gpus.health.enable: 'xid79' is not an XID; ignored"
    ]


def test_what_can_be_used_and_finds_nothing_is_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "muster.yaml"
    entries = [
        "{regex: '^/dev/video', exclude: ['/dev/video[!0]']}",
        "{path: '/dev/tty{USB,ACM}*'}",
        r"{path: '/dev/a\{b,c}'}",
    ]
    file.write_text(FUSE % ", ".join(f"{{devices: [{entry}]}}" for entry in entries))
    code, _, told = called(capfd, "validate", str(file))
    here = f"muster config: {file}: warning: resources[0].groups"
    assert (code, told.splitlines()) == (
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
def test_anothers_file_is_told_apart_from_a_bad_one_of_ours(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str, peer: str
) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text(text)
    code, _, told = called(capfd, "validate", str(file))
    hint = f"{file}: this looks like {peer}'s configuration; try --format {peer}"
    assert (code, told.splitlines()[-1]) == (2, f"muster config: {hint}")


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
    told = f"/dev/fd/{reading}: can be used; 1 resource\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


def test_the_schema_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    code, printed, told = called(capfd, "schema")
    assert (code, told) == (0, "")
    assert json.loads(printed) == json.loads(json.dumps(configure.schema()))

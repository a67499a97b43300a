"""The command `muster config`, as people run it: what it prints, where, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from muster_plugin import configure

FUSE = "apiVersion: muster.dev/v1\nresources: [{name: a.b/fuse, groups: [%s]}]\n"
GROUP = "resources[0].groups[0]"
DEVICES = "{devices: [{path: /dev/fuse}], count: 20}"


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "muster.cli", "config", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=30,
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
    assert run("validate", "-", stdin=printed) == (0, "-: can be used; 1 resources\n", "")


def test_help_is_given_for_the_command_and_each_of_its_commands() -> None:
    assert run("import", "--help")[1].startswith("usage: muster config import")
    assert run()[1].startswith("usage: muster config [-h] COMMAND")


def called(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = configure.main(arguments)
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
            f"muster config: {GROUP}.devices[0]: path: 'dev/fuse' is not an absolute path",
            f"muster config: {GROUP}.cuont: unknown key (value 1); did you mean count?",
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
        (["show", "a\0b"], "a\0b: embedded null byte"),
        (["show", "FILE", "--label", "zone"], "--label: 'zone' is not KEY=VALUE"),
        (["show", "FILE", "--kubelet-directory", "x"], "FILE: directory: 'x' is not an absolute"),
        (
            ["show", "FILE", "--kubelet-directory", "/" + 80 * "x"],
            "FILE: kubelet.directory: the so",
        ),
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


def test_the_schema_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    code, printed, told = called(capfd, "schema")
    assert (code, told) == (0, "")
    assert json.loads(printed) == json.loads(json.dumps(configure.schema()))

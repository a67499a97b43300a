"""A directory of receivers: every valid receiver is used, also if others are invalid."""

import asyncio
import itertools
import os
from pathlib import Path

import pytest

from muster_notifier.config import receiver_settings, schema
from muster_notifier.receivers import directory

SETTINGS = schema.Settings()
WRONG = "expected the settings of one receiver"
OWN = "a secret must be a file in the same directory: {file: NAME}"


def test_a_receiver_has_its_files_name_and_its_secrets_are_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ops.yaml").write_text("slack: {webhook_from: {file: ops.secret}}\n")
    (tmp_path / "ops.secret").write_text("https://hooks.example/x\n")
    (tmp_path / "..data").mkdir()
    secret = receiver_settings.Secret(file=str(tmp_path / "ops.secret"))
    slack = receiver_settings.Slack(webhook_from=secret)
    assert directory.read(tmp_path, SETTINGS) == directory.Content(
        (receiver_settings.Receiver(name="ops", slack=slack),), {}
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", WRONG),
        ("- slack", WRONG),
        ("a: {}\n---\nb: {}\n", WRONG),
        ("{", "not YAML: "),
        ("slak: {}", "slak: unknown key (value {}); did you mean slack?"),
        ("{name: x, file: {path: /a}}", "name: must equal the file's name or be omitted"),
        ("pagerduty: {routing_key_from: {file: /etc/shadow}}", OWN),
        ("pagerduty: {routing_key_from: {file: ../x}}", OWN),
        ("webhook: {url: 'https://a', secrets: [{env: NATS_PASSWORD}]}", OWN),
        ("{}", WRONG),
        ("{console: {}, file: {path: /a}}", "receiver bad: set exactly one of "),
        ("pagerduty: {routing_key_from: {file: none}}", "No such file or directory"),
        ("pagerduty: {routing_key_from: {file: empty}}", "empty"),
        # a YAML bomb: expanded, it would need more memory than a machine has
        ("pagerduty: {routing_key_from: {file: bomb, at: a.k}}", "bomb: a.k: missing or empty"),
    ],
)
def test_a_receiver_that_cannot_be_used_is_left_out_alone(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    (tmp_path / "log.yaml").write_text("console: {}")
    (tmp_path / "empty").write_text(" \n")
    bomb = [
        f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}"
        for a, b in itertools.pairwise("abcdefghij")
    ]
    (tmp_path / "bomb").write_text("\n".join(["a: &a {k: 1, l: 2}", *bomb]))
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.yaml")).write_text("console: {}")
    content = directory.read(tmp_path, SETTINGS)
    log = receiver_settings.Receiver(name="log", console=receiver_settings.Console())
    assert content.receivers == (log,)
    assert list(content.refused) == ["bad", "\\udcff"]
    assert problem in content.refused["bad"]


def test_names_are_taken_once_and_there_is_a_limit(tmp_path: Path) -> None:
    for name in ("console", "-x", *(f"r{number:02}" for number in range(64))):
        (tmp_path / f"{name}.yaml").write_text("console: {}")
    content = directory.read(tmp_path, SETTINGS)
    assert [each.name for each in content.receivers] == [f"r{number:02}" for number in range(63)]
    assert list(content.refused) == ["-x", "console", "r63"]
    assert content.refused["console"] == "the settings already have a receiver of this name"
    assert content.refused["r63"] == "there are already 64 receivers, which is the maximum"


def test_files_beyond_the_limit_are_named_once(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.txt").touch()
    content = directory.read(tmp_path, SETTINGS)
    reason = "not read: only the first 256 files are read"
    assert content == directory.Content((), {"256.txt": reason}, is_complete=False)


def test_a_change_of_a_name_an_inode_a_size_or_a_time_is_noticed_but_the_content_decides(
    tmp_path: Path,
) -> None:
    file = tmp_path / "ops.yaml"
    file.write_text("file: {path: /a}")
    os.utime(file, ns=(1, 1))

    async def story() -> None:
        receivers = directory.Directory(str(tmp_path))
        await receivers.read(SETTINGS)
        assert not await receivers.has_changed()
        # other content of the same size, with the old modification time
        file.write_text("file: {path: /b}")
        os.utime(file, ns=(1, 1))
        assert await receivers.has_changed()
        await receivers.read(SETTINGS)
        # the same content, with another modification time
        os.utime(file, ns=(3, 3))
        assert not await receivers.has_changed()
        beside = tmp_path / ".beside"
        beside.write_text("file: {path: /c}")
        os.utime(beside, ns=(3, 3))
        beside.rename(file)
        assert await receivers.has_changed()
        await receivers.read(SETTINGS)
        file.rename(tmp_path / "other.yaml")
        assert await receivers.has_changed()
        await receivers.read(SETTINGS)
        (tmp_path / "other.yaml").unlink()
        assert await receivers.has_changed()

    asyncio.run(story())


def test_a_directory_that_is_absent_has_no_receivers(tmp_path: Path) -> None:
    async def read(path: str | None) -> directory.Content:
        return await directory.Directory(path).read(SETTINGS)

    (tmp_path / "file").touch()
    assert asyncio.run(read(None)) == directory.Content()
    assert asyncio.run(read(str(tmp_path / "none"))) == directory.Content()
    file = str(tmp_path / "file")
    unread = directory.Content((), {file: "Not a directory"}, is_complete=False)
    assert asyncio.run(read(file)) == unread


@pytest.mark.parametrize(
    ("default", "expected"), [(None, ("console", "ops")), ((), ("ops",)), (("a",), ("a", "ops"))]
)
def test_receivers_of_the_directory_get_what_matches_no_route(
    default: tuple[str, ...] | None, expected: tuple[str, ...]
) -> None:
    console = receiver_settings.Console()
    ops = receiver_settings.Receiver(name="ops", console=console)
    some = (*SETTINGS.receivers, receiver_settings.Receiver(name="a", console=console))
    before = SETTINGS if default is None else schema.Settings(
        receivers=some, default_receivers=default
    )  # fmt: skip
    after = schema.with_receivers(before, (ops,))
    assert schema.route_tree(after).receivers == expected
    assert [each.name for each in after.receivers] == [
        *(each.name for each in before.receivers), "ops"
    ]  # fmt: skip

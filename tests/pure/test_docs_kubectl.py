"""The kubectl commands in our pages name labels, folders and objects that the manifests have."""

import re
from pathlib import Path

import pytest

from tests.worlds import manifests

PAGES = [*sorted((manifests.ROOT / "docs").rglob("*.md")), manifests.ROOT / "README.md"]
TEXT = {page.relative_to(manifests.ROOT): page.read_text("utf-8") for page in PAGES}


def carried(where: Path) -> list[dict[str, str]]:
    """Return the labels of every object and every pod, also of optional ones."""
    parts = ("fuse-broker", "fuse-webhook", "keys", "console")
    more = manifests.with_component("minimal", *parts, where=where)
    objects = [*manifests.objects("production"), *more]
    labels = [o["metadata"].get("labels", {}) for o in objects]
    return labels + [
        o["spec"]["template"]["metadata"]["labels"]
        for o in objects
        if "template" in o.get("spec", {})
    ]


def occurrences(pattern: str) -> list[tuple[Path, str]]:
    """Return every match of a pattern in a kubectl command, with its page."""
    return [
        (page, match)
        for page, text in TEXT.items()
        for command in re.findall(r"kubectl [^`\n]*", text)
        for match in re.findall(pattern, command)
    ]


def test_every_selector_of_a_page_finds_something(tmp_path: Path) -> None:
    labelled = carried(tmp_path)
    selectors = occurrences(r"(?:-l|--selector)[ =]('[^']+'|[^\s`]+)")
    assert len(selectors) > 1
    for page, selector in selectors:
        one_of = re.fullmatch(r"'(\S+) in \(([^)]+)\)'", selector)
        key, values = one_of.groups() if one_of else selector.split("=")
        there = {labels.get(key) for labels in labelled}
        assert set(values.split(", ")) <= there, (page, selector)


def test_every_folder_that_is_applied_is_there() -> None:
    # DIR stands for the reader's own folder; the page creates my-muster
    own = {"DIR", "my-muster"}
    folders = [(page, folder) for page, folder in occurrences(r"-k (\S+)") if folder not in own]
    assert [f for _, f in folders if not (manifests.ROOT / f / "kustomization.yaml").exists()] == []


@pytest.mark.parametrize("kind", ["daemonset", "deployment", "statefulset"])
def test_every_workload_that_a_page_names_is_there(kind: str, tmp_path: Path) -> None:
    optional = ("fuse-broker", "fuse-nri", "fuse-dra", "fuse-webhook", "console")
    every = manifests.with_component("minimal", *optional, where=tmp_path)
    there = {each["metadata"]["name"] for each in every if each["kind"].lower() == kind}
    named = {name for _, name in occurrences(rf"{kind}[/ ](muster-[a-z]+(?:-[a-z]+)*)")}
    assert named <= there

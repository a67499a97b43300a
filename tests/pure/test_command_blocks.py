"""Every block of commands in docs/ runs in a test, or a comment above it says why not.

The blocks of the runbooks have tests of their own (tests/pure/test_runbooks.py, tests/cluster).
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import metadata
from typing import Final, NamedTuple

from muster.cli import __main__ as cli
from muster.cli import reach
from tests.worlds import manifests

DOCS: Final = manifests.ROOT / "docs"
FENCE: Final = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n>]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
KINDS: Final = {"sh", "console", "text", "yaml", "json", "python"}
CALL: Final = re.compile(r"""block\(\s*"([\w/-]+\.md)", (?:"([^"]+)"|'([^']+)')""")
"""A call in a test, which runs the block of a page that contains a phrase."""
RUN: Final = {
    ("install.md", "for user in health"): "tests/pure/test_docs_install.py",
    ("install.md", "cat > my-muster/kustomization.yaml"): "tests/worlds/real_cluster.py",
    ("quick-start.md", "make demo"): "tests/flow/test_demo.py",
    ("upgrade.md", "kubectl apply -k DIR"): "tests/cluster/test_upgrade.py",
}
"""Blocks that a test runs, but not by a call of `block` with the phrase written out."""


REACH: Final = {"--context", "--namespace"}
"""The options that select a cluster; they are parsed before the command."""


class Block(NamedTuple):
    """A fenced block of a page; `why` is the reason why no test runs it."""

    page: str
    kind: str
    text: str
    why: str


def blocks() -> Iterator[Block]:
    """Yield the blocks of all pages but the runbooks."""
    for path in sorted(DOCS.rglob("*.md")):
        page = str(path.relative_to(DOCS))
        # blocks in a list are indented
        text = re.sub(
            r"^    (?=```|<!-- not run|[^ -])", "", path.read_text("utf-8"), flags=re.MULTILINE
        )
        if not page.startswith("runbooks/"):
            for match in FENCE.finditer(text):
                yield Block(page, match["kind"], match["text"], match["why"] or "")


def executed() -> set[tuple[str, str]]:
    """Return the pages and phrases of the blocks that tests run."""
    folders = (manifests.ROOT / "tests/cluster", manifests.ROOT / "tests/worlds")
    sources = [path for folder in folders for path in folder.glob("*.py")]
    calls = {
        (page, double or single)
        for source in sources
        for page, double, single in CALL.findall(source.read_text("utf-8"))
    }
    return {*calls, *RUN}


def test_every_block_names_its_kind() -> None:
    assert [each for each in blocks() if each.kind not in KINDS] == []


def test_every_block_of_commands_runs_in_a_test_or_says_why_not() -> None:
    run = executed()
    neither = [
        (each.page, each.text.splitlines()[0])
        for each in blocks()
        if each.kind == "sh"
        and not each.why
        and not any(each.page == page and phrase in each.text for page, phrase in run)
    ]
    assert neither == []


def test_no_block_that_a_test_runs_is_marked_as_not_run() -> None:
    marked = [
        (each.page, phrase)
        for each in blocks()
        for page, phrase in executed()
        if each.why and each.page == page and phrase in each.text
    ]
    assert marked == []


def test_what_is_said_to_run_a_block_is_there() -> None:
    assert [where for where in RUN.values() if not (manifests.ROOT / where).exists()] == []


def test_every_muster_command_of_a_block_is_valid() -> None:
    project = tomllib.loads((manifests.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    installed = {each.name for each in metadata.entry_points(group="muster.commands")}
    # commands that were added after this environment was installed
    late = tuple(
        f"muster {name}"
        for name in project["entry-points"]["muster.commands"]
        if name not in installed
    )
    commands = [
        (each.page, line.partition("  # ")[0])
        for each in blocks()
        if each.kind == "sh"
        for line in each.text.splitlines()
        if line.startswith("muster ") and not line.startswith(late)
    ]
    assert len(commands) > 10
    for page, command in commands:
        words = shlex.split(re.sub(r" [|>] .*", "", command))[1:]
        reached = [*(REACH & {*words})]
        bare = list(words)
        for option in reached:
            del bare[bare.index(option) : bare.index(option) + 2]
        if words[0] in REACH or bare[0] in reach.NEEDS:
            words = bare
        try:
            cli.app.parse_args(words, exit_on_error=False, print_error=False)
        except Exception as problem:
            raise AssertionError((page, command)) from problem

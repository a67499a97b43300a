"""Old words do not return: docs/glossary.md has the words that stand for them now."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
SHIPPED: Final = ("muster", "services")
CODE: Final = (*SHIPPED, "bench", "scripts", "tests")
LINES_MIN: Final = 40
LINES_MAX: Final = 400
FACES: Final = {"__init__", "__main__", "wording"}
"""Modules that may be short: faces of packages, and what its docstring gives a reason for."""
VARIABLES: Final = {"found", "told", "one"}
MODULES: Final = frozenset(
    """
    agreement around aside asking books breadth census claims compact conviction courier cure desk
    dossier examiner filing foreign found greetings guard hand holder holders housekeeping inquest
    judgement judging knock lanes lines lives notes oracle pairing patience posting probing pulse
    quoting recalled regarding remedy rulebook selfwatch shapes sight sights signs storm survey
    tapes teller telling tenure traffic trouble trust turns unit_life vigil weather words worry
    """.split()  # noqa: SIM905  # words in quotes each would hide the words
)
CLASSES: Final = frozenset(
    """
    Around Beat Books Case Census Conviction Courier Cures Desk Dossier Doubt Ear Greetings Hand
    Inquest Judgement Letter Oracle Pulse Sight Storms Teller Telling Tenure Vigil Weather Worry
    """.split()  # noqa: SIM905  # as above
)
# Not among them, because they are the field's own: the claims of a token (JWT), the holder of a
# lock (the Lease's holderIdentity), what a plugin has advertised (ListAndWatch).
PROSE: Final = {
    r"\bDoor to\b": "Adapter for",
    r"\binquests?\b": "investigation",
    r"\bdossiers?\b": "tracked plugin",
    r"\bconvict(s|ed|ion|ions)?\b": "verdict",
    r"\bcouriers?\b": "update publisher",
    r"\bgoodbyes?\b": "stopping",
    r"\bTake that\b": "say what changes",
    r"\bTell whether\b": "Return whether",
    r"\bWho (falls|comes|leaves|brings)\b": "the noun",
}
"""Phrases in docstrings, comments and documents, with what says it better."""
DOCSTRINGS: Final = {r"\bsince when\b": "when it began"}
"""Phrases in docstrings only, with what says it better; lists in documents may have them."""


def files(*folders: str, suffix: str = ".py") -> Iterator[Path]:
    """Yield the files below the folders, but for what is generated."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
            if "_pb2" not in path.name and "recorded" not in path.parts:
                yield path


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every name that is bound: variables, parameters, attributes, functions."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every docstring, also those of variables, as one line."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split())


@pytest.mark.parametrize("folder", CODE)
def test_a_variable_is_named_for_what_it_holds(folder: str) -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(folder)
        for line, name in bound_names(ast.parse(path.read_text("utf-8")))
        if name.strip("_") in VARIABLES
    ]
    assert vague == []


def test_no_module_has_an_old_name() -> None:
    old = [str(path.relative_to(ROOT)) for path in files(*SHIPPED) if path.stem in MODULES]
    assert old == []


def test_no_shipped_module_is_named_like_a_test() -> None:
    named = [
        str(path.relative_to(ROOT))
        for path in files(*SHIPPED, "scripts", "bench")
        if path.stem.startswith("test_")
    ]
    assert named == []


def test_no_class_has_an_old_name() -> None:
    old = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(*SHIPPED)
        for name in re.findall(r"^ *class (\w+)", path.read_text("utf-8"), re.MULTILINE)
        if name.strip("_") in CLASSES
    ]
    assert old == []


@pytest.mark.parametrize("phrase", PROSE)
def test_no_sentence_speaks_the_old_dialect(phrase: str) -> None:
    texts = [*files(*SHIPPED, "bench", "scripts"), *files("docs", suffix=".md"), ROOT / "README.md"]
    old = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]} (say: {PROSE[phrase]})"
        for path in texts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert old == []


@pytest.mark.parametrize("phrase", DOCSTRINGS)
def test_no_docstring_speaks_the_old_dialect(phrase: str) -> None:
    old = [
        f"{path.relative_to(ROOT)}:{number}: {text[:80]} (say: {DOCSTRINGS[phrase]})"
        for path in files(*CODE)
        for number, text in docstrings(ast.parse(path.read_text("utf-8")))
        if re.search(phrase, text, re.IGNORECASE)
    ]
    assert old == []


def test_no_module_is_a_fragment_or_too_long() -> None:
    wrong = []
    for path in files(*SHIPPED):
        lines = len(path.read_text("utf-8").splitlines())
        if lines > LINES_MAX or (lines < LINES_MIN and path.stem not in FACES):
            wrong.append(f"{path.relative_to(ROOT)}: {lines} lines")
    assert wrong == []

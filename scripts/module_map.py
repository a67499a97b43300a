"""Adapter for files: generates the tables of the module map, services/README.md, from docstrings.

The prose of the map is written by hand; the text between a pair of markers is generated.
"""

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
MAP: Final = Path("services", "README.md")
_MARKED: Final = re.compile(r"(<!-- modules of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render() -> bytes:
    """Return the map with every table of modules, generated from the docstrings."""
    text = (ROOT / MAP).read_text("utf-8")
    return _MARKED.sub(lambda match: match[1] + _tables(Path(match[2])) + match[3], text).encode()


def _tables(top: Path) -> str:
    """Return one table for each package below `top`, outermost first."""
    packages = [path for path in sorted((ROOT / top).rglob("__init__.py")) if _modules(path.parent)]
    return "".join(_table(path.parent, ROOT / top) for path in packages)


def _table(package: Path, top: Path) -> str:
    name = ".".join(package.relative_to(top.parent).parts)
    rows = "".join(f"| `{path.stem}` | {_summary(path)} |\n" for path in _modules(package))
    head = f"**`{name}`**: {_summary(package / '__init__.py')}"
    return f"\n{head}\n\n| module | |\n|---|---|\n{rows}\n"


def _modules(package: Path) -> list[Path]:
    return [path for path in sorted(package.glob("*.py")) if path.stem != "__init__"]


def _summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")

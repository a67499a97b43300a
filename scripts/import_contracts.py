"""Pure: a contract for import-linter: every module that is not an adapter is pure.

A module is an adapter if its docstring starts with `Adapter`. The docstring of every other module
starts with `Pure:`, and the module imports neither the outside world (`forbidden`) nor an adapter.
A package may reexport adapters.
"""

import ast
import importlib.util
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class PureContract(Contract):
    """Modules import neither the outside world nor adapters, unless they are adapters."""

    forbidden = fields.ListField(subfield=fields.StringField())
    generated = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001  # import-linter's signature
        """Find impure imports, and docstrings that do not name the kind of the module."""
        forbidden = set(_strings(self.forbidden))
        generated = set(_strings(self.generated))
        modules = {m for m in graph.modules if not graph.is_module_squashed(m)} - generated
        docstrings = {module: _docstring(module) for module in modules}
        adapters = {module for module in modules if docstrings[module].startswith("Adapter")}
        problems = []
        for module in sorted(modules - adapters):
            is_package = bool(graph.find_children(module))
            if not docstrings[module].startswith("Pure:") and not is_package:
                problems.append(f"{module}: docstring begins with neither `Pure:` nor `Adapter`")
            problems += [
                f"{module}: pure, and imports {name}"
                for name in sorted(graph.find_modules_directly_imported_by(module))
                if name.split(".")[0] in forbidden or (name in adapters and not is_package)
            ]
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print one line per problem."""
        for problem in check.metadata["problems"]:
            output.print_error(problem)


def _strings(values: object) -> list[str]:
    assert isinstance(values, (list, tuple)), "import-linter gives a list field as a list"
    return [str(value) for value in values]


def _docstring(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""

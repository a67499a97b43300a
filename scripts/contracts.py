"""Pure. The import contract that import-linter has not: modules are pure unless they are doors.

A door is on the reviewed list in pyproject.toml; its docstring says so. Every other module imports
neither the outside world (`forbidden`) nor a door.
"""

import ast
import importlib.util
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class PureContract(Contract):
    """Modules are pure unless they are listed as doors; docstrings tell the truth about it."""

    forbidden = fields.ListField(subfield=fields.StringField())
    doors = fields.ListField(subfield=fields.StringField())
    generated = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001  # import-linter's signature
        """Find impure imports and docstrings that say something else."""
        forbidden = set(_strings(self.forbidden))
        doors = set(_strings(self.doors))
        generated = set(_strings(self.generated))
        ours = {m for m in graph.modules if not graph.is_module_squashed(m)} - generated
        problems = [f"{door}: listed as a door, and not there" for door in sorted(doors - ours)]
        for module in sorted(ours):
            said = _docstring(module)
            if module in doors:
                if not said.startswith("Door to ") and not graph.find_children(module):
                    problems.append(f"{module}: a door whose docstring does not say `Door to`")
                continue
            if said.startswith("Door to "):
                problems.append(f"{module}: says it is a door, and is not on the list")
            imported = graph.find_modules_directly_imported_by(module)
            problems.extend(
                f"{module}: pure, and imports {name}"
                for name in sorted(imported)
                if name.split(".")[0] in forbidden or name in doors
            )
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print one line a problem."""
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

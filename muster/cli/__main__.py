"""Adapter for the process: parses the arguments of `muster`, and runs the command."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import cyclopts
from cyclopts import Parameter

import muster
from muster.cli import output, reach, registry

app = cyclopts.App(
    name="muster",
    help="The Kubernetes device plugin suite that never fails silently.",
    version=f"muster {muster.__version__}",
    print_error=False,
    exit_on_error=False,
    result_action="return_int_as_exit_code_else_zero",
)
app.register_install_completion_command()
registry.add(app, sys.argv[1:])


@app.meta.default
def run(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    context: str | None = None,
    namespace: str = reach.NAMESPACE,
) -> int:
    """Run a command; with `context`, it accesses a cluster.

    Parameters
    ----------
    context
        The kubeconfig context of a cluster with muster. The command opens connections to that
        cluster with your rights, and closes them at its end.
    namespace
        The namespace of muster in that cluster.

    """
    command = registry.command_of(tokens) or ""
    if context is None or command not in reach.NEEDS:
        return int(app(tokens) or 0)
    return reach.run(command, tokens, context=context, namespace=namespace, call=app)


def main() -> int:
    """Run the command; return the exit code."""
    if os.environ.get("COLUMNS") == "0":
        # the shell does not know the width; cyclopts would wrap help at 0 characters
        del os.environ["COLUMNS"]
    try:
        with output.guarded():
            return call(sys.argv[1:])
    except cyclopts.UnusedCliTokensError as error:
        unused = " ".join(error.unused_tokens or ())
        return output.fail(" ".join(error.command_chain or ()), f"unexpected arguments: {unused}")
    except cyclopts.CycloptsError as error:
        return output.fail(" ".join(error.command_chain or ()), str(error))
    except output.Unwritable as error:
        if error.is_closed:
            return 0
        return output.fail("", f"standard output: {error}", code=1)


def call(arguments: Sequence[str]) -> int:
    """Call a command and return its exit code.

    Commands that are not in `reach.NEEDS` parse `--context` themselves.
    """
    command = registry.command_of(arguments)
    if command is None or command not in registry.targets():
        return int(app.meta(arguments) or 0)
    if command in reach.NEEDS and registry.missing(command) is None:
        return int(app.meta(arguments) or 0)
    first = list(arguments).index(command)
    # `app` would show the options of `muster` itself in every help text
    return registry.call(command, *arguments[first + 1 :], *arguments[:first])


if __name__ == "__main__":
    sys.exit(main())

"""Adapter: the process: the command `muster`, from its arguments to its exit code."""

import os
import sys

import cyclopts

import muster
from muster.cli import output, registry

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


def main() -> int:
    """Run the command; return the exit code."""
    if os.environ.get("COLUMNS") == "0":
        # the shell does not know the width; cyclopts would wrap help at 0 characters
        del os.environ["COLUMNS"]
    try:
        with output.guarded():
            return int(app(sys.argv[1:]) or 0)
    except cyclopts.CycloptsError as error:
        return output.fail(" ".join(error.command_chain or ()), str(error))
    except output.Unwritable as error:
        if error.is_closed:
            return 0
        return output.fail("", f"standard output: {error}", code=1)


if __name__ == "__main__":
    sys.exit(main())

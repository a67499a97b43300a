"""Adapter for the command line: the labeler's `muster` commands, such as `muster check`.

They need access to a cluster, but not a running muster; `gpu-name` needs neither.
"""

import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import cyclopts
import msgspec
from cyclopts import Parameter

from muster.cli import output as printing
from muster.cli.output import Json
from muster_labeler.cli import options
from muster_labeler.cli.options import Flag
from muster_labeler.naming import accelerators

check = cyclopts.App(name="check")
label_gpus = cyclopts.App(name="label-gpus")
unlabel_gpus = cyclopts.App(name="unlabel-gpus")
uninstall = cyclopts.App(name="uninstall")
gpu_name = cyclopts.App(name="gpu-name")

_INTERNAL: Final = 5
_LINES_MAX: Final = 100_000
_LINE_CHARS_MAX: Final = 4096
_MEMORY: Final = re.compile(r"0*[1-9][0-9]{0,11}")


class _Answer(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    product: str
    memory_mib: int | None
    value: str | None
    reason: str
    is_shared: bool = False


@check.default
def _check(
    topic: Literal["gpu", "fuse", "autoscaler", "plugins", "muster", "all"] = "all",
    /,
    *,
    output: Literal["text", "json", "junit"] = "text",
    json: Json = False,
    strict: Flag = False,
    node: str | None = None,
    cluster: options.Cluster = options.CLUSTER,
) -> int:
    """Report problems with a cluster's GPUs, FUSE, autoscalers, device plugins and muster.

    The command changes nothing.

    Parameters
    ----------
    topic
        What to check.
    output
        How to print the report.
    json
        The same as `--output json`.
    strict
        Exit with 1 for suggestions and warnings too.
    node
        Report on this node only.

    """
    from muster_labeler.cli import check as command  # noqa: PLC0415  # a command imports what it needs when it is called

    kind = "json" if json else output
    return _guarded(
        "check",
        lambda: command.run(topic, cluster=cluster, output=kind, strict=strict, node=node),
    )


@label_gpus.default
def _label_gpus(
    *,
    apply: Flag = False,
    dry_run: Flag = False,
    features: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    label: options.Label = options.LABEL,
    write: options.Write = options.WRITE,
    cluster: options.Cluster = options.CLUSTER,
) -> int:
    """Show how GPU nodes would be labelled, or label them.

    Parameters
    ----------
    apply
        Write the labels, then read them back to verify them.
    dry_run
        Only print the plan, which is the default.
    features
        Write the labels of the node that `--node` names into this file for node-feature-discovery;
        `-` is standard output.

    """
    from muster_labeler.cli import label_gpus as command  # noqa: PLC0415  # a command imports what it needs when it is called

    if apply and dry_run:
        return printing.fail("label-gpus", "--dry-run cannot be combined with --apply")
    request = command.Request(
        command="label-gpus",
        cluster=cluster,
        write=write,
        is_writing=apply,
        label=label,
        features=features,
    )
    return _guarded("label-gpus", lambda: command.run(request))


@unlabel_gpus.default
def _unlabel_gpus(
    *,
    dry_run: Flag = False,
    objects: Flag = False,
    write: options.Write = options.WRITE,
    cluster: options.Cluster = options.CLUSTER,
) -> int:
    """Remove the labels that muster wrote.

    Parameters
    ----------
    dry_run
        Only show what would be removed.
    objects
        Also remove the node conditions, the inventory and the Lease of the labeler.

    """
    from muster_labeler.cli import label_gpus as command  # noqa: PLC0415  # a command imports what it needs when it is called

    request = command.Request(
        command="unlabel-gpus",
        cluster=cluster,
        write=write,
        is_writing=not dry_run,
        has_objects=objects,
    )
    return _guarded("unlabel-gpus", lambda: command.run(request))


@uninstall.default
def _uninstall(
    *,
    dry_run: Flag = False,
    yes: Flag = False,
    cluster: options.Cluster = options.CLUSTER,
) -> int:
    """Remove muster from a cluster, including everything that it wrote to nodes.

    Parameters
    ----------
    dry_run
        Only show what would be removed.
    yes
        Do not ask for confirmation.

    """
    from muster_labeler.cli import uninstall as command  # noqa: PLC0415  # a command imports what it needs when it is called

    request = command.Request(cluster=cluster, yes=yes, is_writing=not dry_run)
    return _guarded("uninstall", lambda: command.run(request))


@gpu_name.default
def _gpu_name(
    product: str | None = None,
    /,
    *rest: Annotated[str, Parameter(show=False)],
    memory_mib: int | None = None,
    mig: Flag = False,
    json: Json = False,
    tsv: Flag = False,
    aliases: Path | None = None,
) -> int:
    """Show which accelerator name a GPU product gets, and why.

    Parameters
    ----------
    product
        The product name that nvidia-smi, NVML, GPU feature discovery or DRA report.
    memory_mib
        The measured memory of the GPU, in MiB.
    mig
        The GPU is partitioned.
    json
        Print JSON.
    tsv
        Read lines of `product<TAB>memory MiB` from standard input.
    aliases
        Reviewed names: a YAML file with lines of `product: name`.

    """
    if product is not None and rest:
        quoted = shlex.quote(" ".join((product, *rest)))
        return printing.fail("gpu-name", f"quote the product: {quoted}")
    if memory_mib is not None and memory_mib <= 0:
        return printing.fail("gpu-name", "--memory-mib must be greater than 0")
    if tsv == (product is not None):
        return printing.fail("gpu-name", "pass one product, or use --tsv with products on stdin")
    return _guarded(
        "gpu-name",
        lambda: _run_gpu_name(
            product, memory_mib=memory_mib, is_mig=mig, as_json=json, file=aliases
        ),
    )


def _guarded(command: str, run: Callable[[], int]) -> int:
    """Return the exit code of `run`, 2 after a usage error, or 5 after an internal error.

    Raises Unwritable.
    """
    try:
        return int(run())
    except options.UsageError as error:
        return printing.fail(command, str(error))
    except printing.Unwritable:
        raise
    except Exception as error:  # noqa: BLE001  # exit code 5 is promised for our own faults
        printing.warn(command, traceback.format_exc())
        return printing.fail(command, f"internal error: {error!r}", code=_INTERNAL)


def _run_gpu_name(
    product: str | None, *, memory_mib: int | None, is_mig: bool, as_json: bool, file: Path | None
) -> int:
    """Print the name of a product, or of each product on stdin; raises UsageError."""
    aliases = options.aliases(file)
    if product is None:
        answers = list(_from_lines(sys.stdin, aliases, is_mig=is_mig))
    else:
        answers = [_answer(product, memory_mib, aliases, is_mig=is_mig)]
    if as_json:
        printing.print_json(answers if product is None else answers[0], indent=2)
        return 0
    for answer in answers:
        cells = [answer.value or "-", answer.reason]
        if product is None:
            cells.append(answer.product)
        printing.show("\t".join(map(printing.plain, cells)))
    return 0


def _from_lines(
    lines: Iterable[str], aliases: Mapping[str, str], *, is_mig: bool
) -> Iterable[_Answer]:
    """Yield the answer for each line of `product<TAB>memory MiB`. Raises UsageError."""
    for number, line in enumerate(lines, start=1):
        if number > _LINES_MAX:
            raise options.UsageError(f"standard input has more than {_LINES_MAX} lines")
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        product, _, memory = text[:_LINE_CHARS_MAX].partition("\t")
        memory = memory.strip()
        if memory and not _MEMORY.fullmatch(memory):
            raise options.UsageError(f"line {number}: {memory[:40]!r} is not a memory size in MiB")
        yield _answer(product, int(memory) if memory else None, aliases, is_mig=is_mig)


def _answer(
    product: str, memory_mib: int | None, aliases: Mapping[str, str], *, is_mig: bool
) -> _Answer:
    name = accelerators.name(product, memory_mib, is_mig=is_mig, aliases=aliases)
    return _Answer(product, memory_mib, name.value, name.reason, name.is_shared)

"""Adapter: the command line: `muster check`, `label-gpus`, `unlabel-gpus` and `gpu-name`.

They need a kubeconfig and no running muster; `gpu-name` needs neither.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal

import cyclopts
from cyclopts import Parameter

from muster.cli import output as printing
from muster.cli.output import Json
from muster_labeler.cli import options
from muster_labeler.cli.options import Flag

check = cyclopts.App(name="check")
label_gpus = cyclopts.App(name="label-gpus")
unlabel_gpus = cyclopts.App(name="unlabel-gpus")
gpu_name = cyclopts.App(name="gpu-name")

_INTERNAL: Final = 5


@check.default
def _check(
    topic: Literal["gpu", "fuse", "autoscaler", "all"] = "all",
    /,
    *,
    output: Literal["text", "json", "junit"] = "text",
    json: Json = False,
    strict: Flag = False,
    node: str | None = None,
    cluster: options.Cluster = options.CLUSTER,
) -> int:
    """Say what is wrong with a cluster's GPUs, fuse and autoscalers.

    Reads only.

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
        Write the labels, and read them back.
    dry_run
        Only show, which is the default.
    features
        Write the labels of the one `--node` into this file for node-feature-discovery; `-` is
        standard output.

    """
    from muster_labeler.cli import label_gpus as command  # noqa: PLC0415  # a command imports what it needs when it is called

    if apply and dry_run:
        return printing.fail("label-gpus", "--dry-run: not with --apply")
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
    """Remove the labels that are ours.

    Parameters
    ----------
    dry_run
        Only show.
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


@gpu_name.default
def _gpu_name(
    product: str | None = None,
    /,
    *,
    memory_mib: int | None = None,
    mig: Flag = False,
    json: Json = False,
    tsv: Flag = False,
    aliases: Path | None = None,
) -> int:
    """Say what a GPU's product would be called, and why.

    Parameters
    ----------
    product
        As nvidia-smi, NVML, GPU feature discovery or DRA write it.
    memory_mib
        Measured memory.
    mig
        The GPU is partitioned.
    json
        Print JSON.
    tsv
        Read lines of `product<TAB>memory MiB` from standard input.
    aliases
        Reviewed names: a YAML file with lines of `product: name`.

    """
    from muster_labeler.cli import gpu_name as command  # noqa: PLC0415  # a command imports what it needs when it is called

    if memory_mib is not None and memory_mib <= 0:
        return printing.fail("gpu-name", "--memory-mib: more than 0")
    if tsv == (product is not None):
        return printing.fail("gpu-name", "name one product, or use --tsv with products on stdin")
    return _guarded(
        "gpu-name",
        lambda: command.run(product, memory_mib=memory_mib, is_mig=mig, as_json=json, file=aliases),
    )


def _guarded(command: str, run: Callable[[], int]) -> int:
    """Return what `run` returns, 2 for a usage error, and 5 for a fault of our own."""
    try:
        return int(run())
    except options.UsageError as error:
        return printing.fail(command, str(error))
    except printing.Unwritable:
        raise
    except Exception as error:  # noqa: BLE001  # exit code 5 is promised for our own faults
        traceback.print_exc()
        return printing.fail(command, f"internal error: {error!r}", code=_INTERNAL)

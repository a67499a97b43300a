"""Adapter: the command line: `muster check`, `label-gpus`, `unlabel-gpus` and `gpu-name`.

They need a kubeconfig and no running muster; `muster` starts this module, as it knows no room.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from muster_labeler import options
from muster_labeler.findings import Exit
from muster_labeler.reports import Output


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code."""
    chosen = _parser().parse_args(argv)
    try:
        return _run(chosen)
    except BrokenPipeError:
        return Exit.FINE
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001  # exit code 5 is promised for our own faults
        import traceback  # noqa: PLC0415  # only for the worst case

        traceback.print_exc()
        options.tell(chosen.command, f"internal error: {error!r}")
        return Exit.INTERNAL


def _run(chosen: argparse.Namespace) -> int:
    # the Kubernetes client costs a quarter of a second: only who asks a cluster pays
    match chosen.command:
        case "gpu-name":
            from muster_labeler import naming  # noqa: PLC0415

            return naming.run(chosen)
        case "check":
            from muster_labeler import check  # noqa: PLC0415

            return check.run(chosen)
        case _:
            from muster_labeler import labelling  # noqa: PLC0415

            return labelling.run(chosen)


class _Parser(argparse.ArgumentParser):
    """Takes options as they are written: `--app` is not `--apply`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="muster", description="Look at clusters, label GPUs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_check(commands.add_parser("check", help="say what is wrong; read only"))
    _add_label(commands.add_parser("label-gpus", help="label GPU nodes; without --apply only show"))
    _add_unlabel(commands.add_parser("unlabel-gpus", help="remove the labels that are ours"))
    _add_name(commands.add_parser("gpu-name", help="say what a product would be called, and why"))
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    topics = ["gpu", "fuse", "autoscaler", "all"]
    parser.add_argument("topic", nargs="?", choices=topics, default="all")
    options.add_cluster(parser)
    parser.add_argument("--output", choices=list(Output), default=Output.TEXT)
    parser.add_argument("--strict", action="store_true", help="suggestions and warnings give 1")
    parser.add_argument("--node", metavar="NAME", help="tell of one node only")


def _add_label(parser: argparse.ArgumentParser) -> None:
    options.add_cluster(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--apply", action="store_true", help="write the labels, and read them back")
    mode.add_argument("--dry-run", action="store_true", help="only show, which is the default")
    parser.add_argument(
        "--features",
        metavar="FILE",
        help="write the labels of the --node into a file for node-feature-discovery; - is stdout",
    )
    _add_which(parser)
    for name, text in [
        ("--allow-unknown", "also names that are guessed from an unknown product"),
        ("--force-ambiguous", "also names that the unknown memory would decide"),
        ("--from-instance-type", "also names concluded from the instance type"),
        ("--overwrite", "also where somebody else owns the label; the old value is kept"),
        ("--partial", "also if that leaves GPU nodes without a label"),
        ("--unheard", "also if agents or DRA may know better, and could not be heard"),
        ("--simulated", "also nodes whose GPUs are simulated"),
    ]:
        parser.add_argument(name, action="store_true", help=text)


def _add_unlabel(parser: argparse.ArgumentParser) -> None:
    options.add_cluster(parser)
    parser.add_argument("--dry-run", action="store_true", help="only show")
    parser.add_argument(
        "--objects", action="store_true", help="remove also what else the labeler wrote down"
    )
    _add_which(parser)


def _add_which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--node", action="append", metavar="NAME", help="this node; can be given several times"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--rate",
        type=float,
        default=100.0,
        metavar="100",
        help="nodes written in a second at most (default: 100)",
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("product", nargs="?", help="as nvidia-smi, NVML, GFD or DRA write it")
    parser.add_argument("--memory-mib", type=int, metavar="MIB", help="measured memory")
    parser.add_argument("--mig", action="store_true", help="the GPU is partitioned")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--tsv",
        action="store_true",
        help="read `product<TAB>memory MiB` lines from standard input",
    )
    parser.add_argument(
        "--aliases", type=pathlib.Path, metavar="FILE", help="reviewed names, as YAML"
    )


if __name__ == "__main__":
    sys.exit(main())

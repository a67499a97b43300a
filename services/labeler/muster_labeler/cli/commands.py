"""Adapter: the command line: `muster check`, `label-gpus`, `unlabel-gpus` and `gpu-name`.

They need a kubeconfig and no running muster; `muster` starts this module, as it knows no room.
"""

import argparse
import asyncio
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import yaml

from muster.kubernetes import api
from muster_labeler.check import cluster_reader, findings, report
from muster_labeler.check.findings import Exit
from muster_labeler.check.report import Output, Topic
from muster_labeler.kubernetes import cluster_api, projection
from muster_labeler.naming import accelerators, sources


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
        print_error(chosen.command, f"internal error: {error!r}")
        return Exit.INTERNAL


def _run(chosen: argparse.Namespace) -> int:
    # the Kubernetes client costs a quarter of a second: only who asks a cluster pays
    match chosen.command:
        case "gpu-name":
            return run_gpu_name(chosen)
        case "check":
            return run_check(chosen)
        case _:
            from muster_labeler.cli import label_gpus  # noqa: PLC0415

            return label_gpus.run(chosen)


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
    add_cluster(parser)
    parser.add_argument("--output", choices=list(Output), default=Output.TEXT)
    parser.add_argument("--strict", action="store_true", help="suggestions and warnings give 1")
    parser.add_argument("--node", metavar="NAME", help="tell of one node only")


def _add_label(parser: argparse.ArgumentParser) -> None:
    add_cluster(parser)
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
    add_cluster(parser)
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


_AGE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(ms|s|m)?")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}
_ATTEMPTS: Final = 4
_DEFAULT: Final = "~/.kube/config"


class UsageError(Exception):
    """What was asked for cannot be; the text says why."""


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Let a command be told which cluster."""
    parser.add_argument("--context", help="context of the kubeconfig (default: its current one)")
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="default: $KUBECONFIG, else ~/.kube/config, else the cluster this runs in",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=20.0,
        metavar="20s",
        help="how long reading may take in all (default: 20s)",
    )
    parser.add_argument(
        "--aliases",
        type=pathlib.Path,
        metavar="FILE",
        help="reviewed names: YAML lines of `product: name`",
    )
    parser.add_argument(
        "--muster-namespace",
        default=projection.MUSTER_NAMESPACE,
        metavar="NAME",
        help="where muster is installed, if it is; its agents know most (default: muster)",
    )


async def connect(chosen: argparse.Namespace) -> api.Api:
    """Return the cluster that was chosen. Raises api.NoCluster."""
    return await api.find(
        kubeconfig=kubeconfig(chosen, os.environ),
        context=chosen.context,
        attempts=_ATTEMPTS,
        timeout_s=chosen.timeout,
    )


def kubeconfig(chosen: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Return the kubeconfig that was named, as kubectl would find it; None is in a pod."""
    found: str | None = chosen.kubeconfig or environment.get("KUBECONFIG")
    if found:
        return found
    default = pathlib.Path(_DEFAULT).expanduser()
    if default.exists() or "KUBERNETES_SERVICE_HOST" not in environment:
        return str(default)
    return None


def seconds(text: str) -> float:
    """Read `20s`, `500ms`, `2m` or a number of seconds."""
    found = _AGE.fullmatch(text)
    value = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 20s")
    return value


def usage_error(command: str, text: str) -> int:
    """Tell a person what cannot be; return the exit code for it."""
    print_error(command, text)
    return 2


def print_error(command: str, text: str) -> None:
    """Tell a person something beside the command's own output."""
    sys.stderr.write(f"muster {command}: {report.plain(text)}\n")


def progress_printer() -> Callable[[str], None]:
    """Return what tells how far we have come: to people, on one line; to files nothing."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" if text else "\r\x1b[K")
        sys.stderr.flush()

    return show


def run_check(chosen: argparse.Namespace) -> int:
    """Check what was chosen and print it; return the exit code."""
    try:
        known = aliases(chosen.aliases)
        result = asyncio.run(_report(chosen, known))
    except (BadAliases, UsageError) as error:
        return usage_error("check", str(error))
    except (api.NoCluster, cluster_reader.Unreachable) as error:
        print_error("check", str(error))
        if chosen.output != report.Output.TEXT:
            # a program reads one document, whatever happened
            unread = findings.ClusterView(
                now=datetime.now(UTC), unread=[findings.Unread("cluster", str(error))]
            )
            cluster = chosen.context or chosen.kubeconfig or "cluster"
            result = report.evaluate(unread, [], findings.Commands(), cluster=cluster)
            sys.stdout.write(report.render(result, report.Output(chosen.output)))
        return Exit.UNREACHABLE
    sys.stdout.write(report.render(result, report.Output(chosen.output)))
    return findings.exit_code(result, strict=chosen.strict)


async def _report(chosen: argparse.Namespace, aliases: dict[str, str]) -> findings.Report:
    topics = list(Topic) if chosen.topic == "all" else [Topic(chosen.topic)]
    progress = progress_printer()
    async with await connect(chosen) as api:
        read = cluster_reader.ClusterReader(api, timeout_s=chosen.timeout, progress=progress)
        await read.check_access(_rights(topics))
        seen = await _read(read, topics, chosen, aliases, api)
        progress("")
    if chosen.node and seen.nodes is not None and chosen.node not in {n.name for n in seen.nodes}:
        raise UsageError(f"no such node: {chosen.node}")
    where = findings.Commands(
        context=api.context,
        kubeconfig=chosen.kubeconfig or os.environ.get("KUBECONFIG"),
        aliases=str(chosen.aliases) if chosen.aliases else None,
        namespace=chosen.muster_namespace
        if chosen.muster_namespace != projection.MUSTER_NAMESPACE
        else None,
    )
    cluster = chosen.context or api.server
    return report.evaluate(seen, topics, where, cluster=cluster, only=chosen.node)


def _rights(topics: list[Topic]) -> tuple[cluster_api.Permission, ...]:
    if Topic.AUTOSCALER in topics:
        return cluster_reader.AUTOSCALER
    return cluster_reader.FUSE if Topic.FUSE in topics else cluster_reader.GPU


async def _read(
    read: cluster_reader.ClusterReader,
    topics: list[Topic],
    chosen: argparse.Namespace,
    aliases: dict[str, str],
    api: api.Api,
) -> findings.ClusterView:
    wants_pods = topics != [Topic.GPU]
    nodes = await read.nodes()
    slices = await read.slices()
    agents, simulated = await read.reports(chosen.muster_namespace)
    pods = await read.pods() if wants_pods else None
    events = await read.events() if wants_pods else None
    is_annotated = any(pod.is_annotated for pod in pods or ())
    namespaces = await read.namespaces() if is_annotated else None
    scaler, karpenter = await read.autoscalers() if Topic.AUTOSCALER in topics else (None, None)
    return findings.ClusterView(
        now=api.now() or datetime.now(UTC),
        nodes=nodes,
        evidence=sources.Evidence(agents, cluster_reader.gpus_by_node(slices), aliases),
        simulated=simulated,
        slices=slices,
        pods=pods,
        events=events,
        namespaces=namespaces,
        autoscaler=scaler,
        karpenter=karpenter,
        unread=tuple(read.unread),
    )


_FILE_BYTES_MAX: Final = 1024 * 1024
_LINES_MAX: Final = 100_000
_LINE_MAX: Final = 4096
_MEMORY: Final = re.compile(r"0*[1-9][0-9]{0,11}")


class BadAliases(Exception):
    """The alias file cannot be used; the text says why."""


class _Answer(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    product: str
    memory_mib: int | None
    value: str | None
    reason: str
    is_shared: bool = False


def aliases(file: pathlib.Path | None) -> dict[str, str]:
    """Return the reviewed names in a YAML file of `product: name`. Raises BadAliases."""
    if file is None:
        return {}
    try:
        with file.open("rb") as opened:
            found = yaml.safe_load(opened.read(_FILE_BYTES_MAX).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadAliases(f"{file}: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadAliases(f"{file}: not a mapping of products to names")
    for product, name in found.items():
        if not (isinstance(product, str) and isinstance(name, str) and accelerators.is_name(name)):
            raise BadAliases(f"{file}: {product!r}: {name!r} is no accelerator name")
    return found


def run_gpu_name(chosen: argparse.Namespace) -> int:
    """Print what each product would be called; return the exit code."""
    try:
        known = aliases(chosen.aliases)
    except BadAliases as error:
        return _mistake(str(error))
    if chosen.memory_mib is not None and chosen.memory_mib <= 0:
        return _mistake("--memory-mib: more than 0")
    if chosen.tsv == (chosen.product is not None):
        return _mistake("name one product, or give --tsv and products on standard input")
    if not chosen.tsv:
        answers = [_answer(chosen.product, chosen.memory_mib, known, is_mig=chosen.mig)]
    else:
        try:
            answers = list(_lines(sys.stdin, known, is_mig=chosen.mig))
        except ValueError as error:
            return _mistake(str(error))
    sys.stdout.write(_written(answers, as_json=chosen.json, is_list=chosen.tsv))
    return 0


def _written(answers: Sequence[_Answer], *, as_json: bool, is_list: bool) -> str:
    if as_json:
        document = msgspec.json.encode(answers if is_list else answers[0])
        return msgspec.json.format(document).decode() + "\n"
    lines = [[one.value or "-", one.reason, *([one.product] if is_list else [])] for one in answers]
    return "".join("\t".join(report.plain(word) for word in line) + "\n" for line in lines)


def _lines(lines: Iterable[str], known: Mapping[str, str], *, is_mig: bool) -> Iterable[_Answer]:
    """Read `product<TAB>memory MiB` lines. Raises ValueError that names the line."""
    for number, line in enumerate(lines, start=1):
        if number > _LINES_MAX:
            raise ValueError(f"more than {_LINES_MAX} lines")
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        product, _, memory = text[:_LINE_MAX].partition("\t")
        memory = memory.strip()
        if memory and not _MEMORY.fullmatch(memory):
            raise ValueError(f"line {number}: {memory[:40]!r} is no memory in MiB")
        yield _answer(product, int(memory) if memory else None, known, is_mig=is_mig)


def _answer(
    product: str, memory_mib: int | None, known: Mapping[str, str], *, is_mig: bool
) -> _Answer:
    name = accelerators.name(product, memory_mib, is_mig=is_mig, aliases=known)
    return _Answer(product, memory_mib, name.value, name.reason, name.is_shared)


def _mistake(text: str) -> int:
    sys.stderr.write(f"muster gpu-name: {report.plain(text)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""Adapter: the command line of the configuration: validate, show, schema, import.

Exit codes: 0 the file can be used, 2 it cannot (one line for each problem on stderr). What is
printed on stdout can be saved as a file; what a person should read besides goes to stderr.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from muster import vocabulary
from muster.service import settings, validation
from muster_plugin.config import document, files, gpus
from muster_plugin.config import settings as config_settings
from muster_plugin.discovery import devfs, resource_plan
from muster_plugin.gpu import replicas, xid_policy
from muster_plugin.gpu import source as gpu_source
from muster_plugin.model import advertised, gpu

_BYTES_MAX: Final = 1024 * 1024 + 1
_PEERS: Final = [form.value for form in files.Format if form != "muster"]


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code."""
    chosen = _parser().parse_args(argv)
    try:
        match chosen.command:
            case "schema":
                _print(msgspec.json.format(msgspec.json.encode(schema()), indent=2))
            case "import":
                _import(chosen)
            case "show":
                _show(chosen)
            case _:
                _validate(chosen)
    except settings.BadSettings as error:
        for problem in error.problems:
            _tell(problem)
        return 2
    return 0


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the plugin's configuration file, for editors."""
    found = msgspec.json.schema(config_settings.Settings)
    for shape in found["$defs"].values():
        if "properties" in shape:
            # the loader refuses unknown keys; msgspec's schemas allow them
            shape["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://muster.dev/schemas/v1/config.json",
        **found,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster config",
        description="Check, show and import the configuration of the devices.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in [
        ("validate", "say whether a file can be used, or everything that is wrong with it"),
        ("show", "print what holds on one node"),
    ]:
        command = commands.add_parser(name, help=text, description=text)
        _add_file(command)
        command.add_argument(
            "--format",
            choices=[form.value for form in files.Format],
            default=files.Format.MUSTER.value,
            help="whose configuration it is (default: muster)",
        )
        command.add_argument("--node", default="", metavar="NAME", help="the node's name")
        command.add_argument(
            "--label",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a label of the node; can be given several times",
        )
        command.add_argument(
            "--kubelet-directory",
            metavar="DIRECTORY",
            help="where the sockets will be, if not where the file says",
        )
        if name == "show":
            command.add_argument(
                "--matches", action="store_true", help="show which devices of this machine it means"
            )
    text = "print the JSON Schema of the configuration, for editors"
    commands.add_parser("schema", help=text, description=text)
    text = "print another plugin's configuration as muster's; what will differ goes to stderr"
    command = commands.add_parser("import", help=text, description=text)
    command.add_argument(
        "--from", dest="format", choices=_PEERS, required=True, help="whose configuration it is"
    )
    _add_file(command)
    return parser


def _add_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file", metavar="FILE", help="a YAML file, or a manifest that holds it; - is stdin"
    )
    command.add_argument("--domain", help="the domain of generic's resources")


def _import(chosen: argparse.Namespace) -> None:
    form = files.Format(chosen.format)
    found = files.import_peer(
        _text(chosen.file), source=chosen.file, peer=form, domain=_domain(chosen)
    )
    for difference in found.differences:
        _tell(f"difference: {difference}")
    _print(msgspec.yaml.encode(found.rules))


def _show(chosen: argparse.Namespace) -> None:
    read = _read(chosen)
    found = _at(chosen, read)
    if found == document.NodeConfiguration():
        _print(b"# nothing on this node")
    elif chosen.matches:
        here = _matches(found, read.simulated_gpus, chosen.node or read.node)
        _print("\n".join(here.lines).encode())
        for problem in here.problems:
            _tell(problem)
    else:
        shown = document.Document(
            api_version=document.API_VERSION, resources=found.resources, gpus=found.gpus
        )
        _print(msgspec.yaml.encode(shown))
        for warning in xid_policy.warnings(found.gpus):
            _tell(f"{chosen.file}: warning: {warning}")


def _validate(chosen: argparse.Namespace) -> None:
    read = _read(chosen)
    found = _at(chosen, read)
    of_gpus = [*xid_policy.warnings(read.gpus)]
    for at, some in enumerate(read.nodes):
        of_gpus += (f"nodes[{at}].{warning}" for warning in xid_policy.warnings(some.gpus))
    for warning in (*document.warnings(read.resources, read.nodes), *of_gpus):
        _tell(f"{chosen.file}: warning: {warning}")
    is_asked = bool(chosen.node or chosen.label)
    told = [_counted(found)]
    if read.nodes and not is_asked:
        told = [f"{told[0]} on every node", "more on some: --node and --label show which"]
    elif chosen.node:
        told = [f"{told[0]} on {chosen.node}"]
    _print(f"{chosen.file}: can be used; {'; '.join(told)}".encode())


def _counted(found: document.NodeConfiguration) -> str:
    count = len(found.resources)
    resources = f"{count or 'no'} resource{'' if count == 1 else 's'}"
    if found.gpus:
        return f"{resources} and GPUs" if count else "GPUs"
    return resources if count else "nothing"


def _read(chosen: argparse.Namespace) -> config_settings.Settings:
    """Return what the file says, for the directory and the labels that were given."""
    found = files.read(
        _text(chosen.file),
        source=chosen.file,
        written_for=files.Format(chosen.format),
        domain=_domain(chosen),
    )
    labels = dict(_label(text) for text in chosen.label)
    try:
        kubelet = config_settings.Kubelet(
            directory=chosen.kubelet_directory or found.kubelet.directory
        )
        return msgspec.structs.replace(found, kubelet=kubelet, labels=labels or found.labels)
    except validation.Refused as error:
        told = [problem.removeprefix("kubelet.") for problem in error.problems]
        problems = [f"--kubelet-directory: {text.removeprefix('directory: ')}" for text in told]
        raise settings.BadSettings(problems) from None


def _at(chosen: argparse.Namespace, found: config_settings.Settings) -> document.NodeConfiguration:
    """Return what holds on the node that was named."""
    try:
        node = msgspec.convert(chosen.node or found.node or "any", vocabulary.NodeName)
        return found.at(node if chosen.node or found.node else "")
    except msgspec.ValidationError:
        problem = f"--node: {validation.quoted(chosen.node)} is not a Kubernetes node name"
        raise settings.BadSettings([problem]) from None
    except validation.Refused as error:
        where = f" on {chosen.node}" if chosen.node else ""
        problems = [f"{chosen.file}{where}: {problem}" for problem in error.problems]
        raise settings.BadSettings(problems) from None


def _domain(chosen: argparse.Namespace) -> str | None:
    if chosen.domain and chosen.format != files.Format.GENERIC:
        raise settings.BadSettings(["--domain: only generic's resources take it"])
    return str(chosen.domain) if chosen.domain else None


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise settings.BadSettings([f"--label: {text!r} is not KEY=VALUE"])
    return key, value


def _text(file: str) -> bytes:
    try:
        if file == "-":
            return sys.stdin.buffer.read(_BYTES_MAX)
        with Path(file).open("rb") as opened:
            return opened.read(_BYTES_MAX)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise settings.BadSettings([f"{file}: {problem}"]) from None


def _print(text: bytes) -> None:
    sys.stdout.buffer.write(text if text.endswith(b"\n") else text + b"\n")


def _tell(line: str) -> None:
    sys.stderr.write(f"muster config: {line}\n")


class Matches(msgspec.Struct, frozen=True, kw_only=True):
    """A table in lines, and what a person should know besides."""

    lines: Sequence[str]
    problems: Sequence[str] = ()


def _matches(
    found: document.NodeConfiguration, made: config_settings.SimulatedGpus | None, node: str
) -> Matches:
    """Look at this machine, or at GPUs that are `made` for a node of that name."""
    entries = [nodes for resource in found.resources for _, nodes in resource.nodes()]
    plan = resource_plan.plan(found.resources, devfs.scan(entries))
    seen: tuple[vocabulary.Gpu, ...] = ()
    if found.gpus is not None:
        look = asyncio.run(_look(found.gpus, made, node))
        seen = look.gpus
        plan = resource_plan.merged(plan, replicas.plan(look, found.gpus))
    rows = [("RESOURCE", "DEVICE", "GIVES")]
    for offer in plan.offers:
        rows += [*_rows(offer, seen)] or [(offer.name, "-", "nothing is there")]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return Matches(
        lines=[
            f"{name:{widths[0]}}  {device:{widths[1]}}  {gives}" for name, device, gives in rows
        ],
        problems=plan.problems,
    )


async def _look(told: gpus.Gpus, made: config_settings.SimulatedGpus | None, node: str) -> gpu.Scan:
    from muster_plugin.gpu import simulated  # noqa: PLC0415  # only where GPUs are meant
    from muster_plugin.gpu.nvml import observer  # noqa: PLC0415  # only where GPUs are meant

    source: gpu_source.Source = (
        simulated.SimulatedSource(made, node, poll_s=told.health.poll_s)
        if made
        else observer.NvmlSource(told)
    )
    try:
        return await source.first_scan(gpu_source.FIRST_SCAN_S)
    finally:
        await source.close()


def _rows(
    offer: resource_plan.PlannedResource, seen: Iterable[vocabulary.Gpu]
) -> Iterator[tuple[str, str, str]]:
    """Give a row for each thing; its ids are told by the first."""
    things: dict[str, list[advertised.Unit]] = {}
    for unit in offer.units:
        things.setdefault(unit.physical, []).append(unit)
    words = {device: text for one in seen for device, text in _described(one).items()}
    for name, same in things.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        paths = [device.host_path for device in same[0].devices]
        paths += [mount.host_path for mount in same[0].mounts]
        yield offer.name, f"{same[0].id}{more}", words.get(name) or ", ".join(paths)


def _described(one: vocabulary.Gpu) -> Mapping[str, str]:
    """Say what a GPU and its MIG devices are, by uuid."""
    which = f"GPU {one.index}" if one.index is not None else "a GPU"
    parts = {mig.uuid: f"{mig.profile} of {which}, {one.product}" for mig in one.mig}
    return {one.uuid: f"{which}, {one.product}", **parts}


if __name__ == "__main__":
    sys.exit(main())

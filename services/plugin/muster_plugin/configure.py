"""Door to the command line of the configuration: validate, show, schema, import.

Exit codes: 0 the file can be used, 2 it cannot (one line for each problem on stderr). What is
printed on stdout can be saved as a file; what a person should read besides goes to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from muster import settings
from muster_plugin import config, configuration, rulebook

_BYTES_MAX: Final = 1024 * 1024 + 1
_PEERS: Final = [form.value for form in configuration.Format if form != "muster"]


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
                found = _at(chosen)
                is_empty = found == rulebook.Here()
                shown = rulebook.Rules(
                    api_version=rulebook.API_VERSION, resources=found.resources, gpus=found.gpus
                )
                _print(b"# nothing on this node" if is_empty else msgspec.yaml.encode(shown))
            case _:
                where = f" on {chosen.node}" if chosen.node else ""
                _print(f"{chosen.file}: can be used; {_counted(_at(chosen))}{where}".encode())
    except settings.BadSettings as error:
        for problem in error.problems:
            _tell(problem)
        return 2
    return 0


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the plugin's configuration file, for editors."""
    found = msgspec.json.schema(config.Settings)
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
            choices=list(configuration.Format),
            default=configuration.Format.MUSTER,
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
    command.add_argument("--domain", help="the resources' domain, for --device flags of generic's")


def _import(chosen: argparse.Namespace) -> None:
    found = configuration.imported(
        _text(chosen.file),
        source=chosen.file,
        peer=configuration.Format(chosen.format),
        domain=chosen.domain,
    )
    for difference in found.differences:
        _tell(f"difference: {difference}")
    _print(msgspec.yaml.encode(found.rules))


def _counted(found: rulebook.Here) -> str:
    gpus = " and GPUs" if found.gpus else ""
    return f"{len(found.resources)} resources{gpus}"


def _at(chosen: argparse.Namespace) -> rulebook.Here:
    """Return what holds on the node that was named."""
    labels = dict(_label(text) for text in chosen.label)
    try:
        found = configuration.read(
            _text(chosen.file),
            source=chosen.file,
            written_for=configuration.Format(chosen.format),
            domain=chosen.domain,
        )
        directory = chosen.kubelet_directory or found.kubelet.directory
        there = msgspec.structs.replace(
            found,
            kubelet=config.Kubelet(directory=directory),
            labels=labels or found.labels,
        )
        return there.at(chosen.node or found.node)
    except settings.BadSettings:
        raise
    except ValueError as error:
        # what only shows with this node, these labels or this directory
        raise settings.BadSettings([f"{chosen.file}: {error}"]) from None


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


if __name__ == "__main__":
    sys.exit(main())

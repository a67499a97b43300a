"""Adapter: the generated files: JSON Schemas, AsyncAPI document, map of modules, protobuf stubs.

    python scripts/generate.py           write what is stale
    python scripts/generate.py --check   write nothing; exit 1 and name what is stale

Protobuf code is made by an old generator on purpose: it refuses runtimes older than itself. The
check therefore compares descriptors, which no generator version changes.
"""

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from google.protobuf import descriptor_pb2

from muster import __version__, codec, vocabulary
from muster_plugin.cli import configure
from scripts import module_map

ROOT: Final = Path(__file__).resolve().parent.parent
GENERATOR: Final = "grpcio-tools==1.71.2"


def documents() -> dict[Path, bytes]:
    """Return every document made from the vocabulary, by its path below the root."""
    kinds: list[Any] = [*vocabulary.EVENTS, vocabulary.Heartbeat]
    files: dict[Path, bytes] = {}
    for kind in kinds:
        schema = msgspec.json.schema(kind)
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": codec.schema_uri(kind.TYPE),
            **schema,
        }
        files[Path("schemas", f"{kind.TYPE}.json")] = _pretty(schema)
    files[Path("schemas", "asyncapi.json")] = _pretty(_asyncapi())
    files[Path("schemas", "config.json")] = _pretty(configure.schema())
    return files


def _asyncapi() -> dict[str, Any]:
    kinds: list[Any] = [*vocabulary.EVENTS, vocabulary.Heartbeat]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas["CloudEvent"] = _envelope()
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "muster",
            "version": __version__,
            "description": "Every fact on muster's bus. A dot in a node name is `_` in a subject.",
        },
        "servers": {"local": {"host": "localhost:4222", "protocol": "nats"}},
        "defaultContentType": "application/json",
        "channels": {k.__name__: _channel(k) for k in kinds},
        "operations": {
            f"send{k.__name__}": {
                "action": "send",
                "channel": {"$ref": f"#/channels/{k.__name__}"},
            }
            for k in kinds
        },
        "components": {
            "schemas": schemas,
            "messages": {k.__name__: _message(k) for k in kinds},
        },
    }


def _channel(kind: Any) -> dict[str, Any]:
    return {
        "address": kind.SUBJECT,
        "description": " ".join((kind.__doc__ or "").split()),
        "parameters": {name: {} for name in re.findall(r"{(\w+)}", kind.SUBJECT)},
        "messages": {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"}},
    }


def _message(kind: Any) -> dict[str, Any]:
    data = {"$ref": f"#/components/schemas/{kind.__name__}"}
    if kind is vocabulary.Heartbeat:
        return {"name": kind.TYPE, "contentType": "application/json", "payload": data}
    envelope = {
        "type": "object",
        "required": ["data", "type"],
        "properties": {"type": {"const": codec.TYPE_PREFIX + kind.TYPE}, "data": data},
    }
    payload = {"allOf": [{"$ref": "#/components/schemas/CloudEvent"}, envelope]}
    return {"name": kind.TYPE, "contentType": codec.CONTENT_TYPE, "payload": payload}


def _envelope() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "title": "CloudEvent",
        "description": "CloudEvents 1.0, structured mode; instance and sequence order a producer.",
        "type": "object",
        "required": ["specversion", "id", "source", "type", "time", "data"],
        "properties": {
            "specversion": {"const": "1.0"},
            "id": text,
            "source": {"type": "string", "format": "uri-reference"},
            "type": text,
            "time": {"type": "string", "format": "date-time"},
            "dataschema": {"type": "string", "format": "uri"},
            "datacontenttype": {"const": "application/json"},
            "instance": text,
            "sequence": {"type": "string", "pattern": "^[0-9]+$"},
            "boot": text,
            "data": {"type": "object"},
        },
    }


def _pretty(tree: dict[str, Any]) -> bytes:
    tree = _dedented(tree)
    return msgspec.json.format(msgspec.json.encode(tree, order="deterministic"), indent=2) + b"\n"


def _dedented(tree: Any) -> Any:
    """Return the tree with every description dedented, which Python 3.13 does by itself."""
    if isinstance(tree, list):
        return [_dedented(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: inspect.cleandoc(value)
        if key == "description" and isinstance(value, str)
        else _dedented(value)
        for key, value in tree.items()
    }


def stale_stubs() -> list[str]:
    """Return the .proto files whose checked-in stubs describe something else."""
    with tempfile.TemporaryDirectory() as scratch:
        descriptors = Path(scratch, "descriptors")
        _run(
            sys.executable, f"--descriptor_set_out={descriptors}", f"-I{ROOT / 'proto'}", *_protos()
        )
        wanted = descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes())
    stale = []
    for file in wanted.file:
        stub = ROOT / file.name.replace(".proto", "_pb2.py")
        _forget_json_names(file.message_type)
        if not stub.exists() or _descriptor_in(stub) != file:
            stale.append(file.name)
    return stale


def _forget_json_names(messages: Iterable[descriptor_pb2.DescriptorProto]) -> None:
    """Drop what protoc derives and the stubs leave out."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _forget_json_names(message.nested_type)


def _descriptor_in(stub: Path) -> descriptor_pb2.FileDescriptorProto:
    module = f"muster.pb.{stub.stem}"
    code = f"import sys, {module} as m; sys.stdout.buffer.write(m.DESCRIPTOR.serialized_pb)"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout  # noqa: S603  # our own stub
    return descriptor_pb2.FileDescriptorProto.FromString(text)


def _protos() -> list[str]:
    return sorted(str(p.relative_to(ROOT / "proto")) for p in (ROOT / "proto").rglob("*.proto"))


def _run(python: str, *arguments: str) -> None:
    command = [python, "-m", "grpc_tools.protoc", *arguments]
    subprocess.run(command, check=True, cwd=ROOT)  # noqa: S603  # our own arguments


def write_stubs() -> None:
    """Write the stubs with the pinned generator, in an environment of its own."""
    home = ROOT / "build" / "generator"
    python = home / "bin" / "python"
    if not python.exists():
        print(f"making an environment for {GENERATOR}")
        venv.create(home, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", GENERATOR, "setuptools<81"]
        subprocess.run(command, check=True)  # noqa: S603  # our own arguments
    _run(str(python), "-Iproto", "--python_out=.", "--pyi_out=.", *_protos())


def _says(path: Path, text: bytes) -> bool:
    return (ROOT / path).is_file() and (ROOT / path).read_bytes() == text


def main() -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description="Make the generated files.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    check = parser.parse_args().check
    wanted = documents() | {module_map.MAP: module_map.render()}
    there = {p.relative_to(ROOT) for p in (ROOT / "schemas").glob("*.json")}
    stale = [p for p, text in wanted.items() if not _says(p, text)]
    left_over = sorted(there - wanted.keys())
    stubs = stale_stubs()
    if check:
        for name in (*stale, *left_over, *stubs):
            print(f"stale: {name}; run: make generate")
        return 1 if stale or left_over or stubs else 0
    for path in left_over:
        (ROOT / path).unlink()
    for path in stale:
        (ROOT / path).write_bytes(wanted[path])
        print(f"wrote {path}")
    if stubs:
        write_stubs()
        print(f"wrote the stubs of {', '.join(stubs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

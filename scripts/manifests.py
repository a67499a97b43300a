"""Adapter for files: generates manifests: nats-server's accounts, the chart, and compose settings.

python scripts/manifests.py            write stale files
python scripts/manifests.py --check    write nothing; print stale files and exit with 1
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import yaml

import muster
from muster import vocabulary
from muster.local import central_settings, stack
from muster.nats.auth import permissions, server_conf
from muster_console import config as console_config
from muster_fuse import config as fuse_config
from muster_health.model import config as health_config
from muster_labeler import config as labeler_config
from muster_labeler.naming import allowed_labels
from muster_notifier.config import receiver_settings
from muster_notifier.config import schema as notifier_schema
from muster_plugin.config import resources
from muster_plugin.config import settings as plugin_settings
from scripts import dashboard

ROOT: Final = Path(__file__).resolve().parent.parent


_Object: TypeAlias = dict[str, Any]
_PARTS: Final = (
    "base",
    "overlays/production",
    "overlays/gpu",
    "overlays/openshift",
    "overlays/watch",
    *(
        f"components/{name}"
        for name in (
            *("fuse-broker", "fuse-broker-tls", "fuse-webhook", "fuse-nri", "fuse-dra"),
            *("watch-rights", "watch-processes", "watch-drivers", "monitoring"),
            *("console", "console-production"),
            *("console-writing", "console-writing-production", "console-oidc"),
            *("keys", "keys-production"),
        )
    ),
)
"""The directories below k8s that the chart can enable."""
_MADE: Final = re.compile(r"(    # made by .*\n)(?:.*\n)*(    # end of the generated part\n)")


def documents() -> dict[Path, bytes]:
    """Return every generated file by its path below the root."""
    # kustomize reads no file above its own directory
    base = (ROOT / "k8s/base/nats/nats.conf").read_bytes()
    again = {
        Path("k8s/overlays/production/base.conf"): base,
        Path("k8s/components/monitoring/muster.json"): dashboard.text().encode(),
    }
    accounts = _accounts()
    admission, rules = _admission(), _rules()
    return (
        accounts
        | {Path("k8s/base/admission.yaml"): admission.encode()}
        | {Path("k8s/components/monitoring/rules.yaml"): rules.encode()}
        | _compose()
        | again
        | _chart(accounts[Path("k8s/base/nats/accounts.conf")], admission, rules)
    )


def _admission() -> str:
    """Return the admission policy with the labels that the labeler may write."""
    forms = ",\n".join(
        f"        {json.dumps(key)}: {json.dumps(f'^({form})$')}"
        for key, form in allowed_labels.FORMS.items()
    )
    made = (
        f"    - name: forms\n      expression: >-\n        {{\n{forms}\n        }}\n"
        f"    - name: profileKey\n      expression: '\"^{allowed_labels.PROFILE_KEY}$\"'\n"
        f"    - name: profileLabel\n      expression: '\"^{allowed_labels.PROFILE_LABEL}$\"'\n"
    )
    text = (ROOT / "k8s/base/admission.yaml").read_text("utf-8")
    return _MADE.sub(lambda match: f"{match[1]}{made}{match[2]}", text)


def _rules() -> str:
    """Return the Prometheus rules with links to the runbooks of this version."""
    text = (ROOT / "k8s/components/monitoring/rules.yaml").read_text("utf-8")
    return re.sub(r"(runbook_url: )\S+/", rf"\g<1>{muster.RUNBOOKS_URL}", text)


def _chart(accounts: bytes, admission: str, rules: str) -> dict[Path, bytes]:
    """Return the part of the Helm chart that is generated from base, overlays and components."""
    k8s, chart = ROOT / "k8s", Path("k8s/chart/muster")
    schema = _schema(yaml.safe_load((k8s / "chart/values.schema.yaml").read_text("utf-8")))
    made = {"base/admission.yaml": admission, "monitoring/rules.yaml": rules}
    parts = {Path(folder).name: _part(k8s / folder, made) for folder in _PARTS}
    return {
        chart / "files/nats.conf": (k8s / "base/nats/nats.conf").read_bytes(),
        chart / "files/production.conf": (k8s / "overlays/production/nats.conf").read_bytes(),
        chart / "files/accounts.conf": accounts,
        chart / "files/muster.json": dashboard.text().encode(),
        chart / "files/manifests.yaml": _made("k8s/base, overlays and components", parts),
        chart / "files/known.yaml": _made("k8s/chart/values.schema.yaml", _known(schema)),
        # Go's regular expressions end with $, not \Z
        chart / "values.schema.json": json.dumps(schema, indent=1).replace(r"\\Z", "$").encode(),
    }


def _part(folder: Path, made: Mapping[str, str]) -> _Object:
    """Return the objects that a directory adds, and its patches of other objects."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    objects: list[_Object] = []
    for name in kustomization.get("resources", []):
        if name.endswith(".yaml") and name != "namespace.yaml":
            text = made.get(f"{folder.name}/{name}") or (folder / name).read_text("utf-8")
            objects += yaml.safe_load_all(text)
    patches = [
        {**patch["target"], "operations": yaml.safe_load(patch["patch"])}
        for patch in kustomization.get("patches", [])
    ]
    return {"objects": objects, "patches": patches}


def _schema(written: _Object) -> _Object:
    """Return the schema of the chart's values, with the schemas of all services' settings."""
    shapes = {
        "plugin": plugin_settings.Settings,
        "health": health_config.Settings,
        "labeler": labeler_config.Settings,
        "notifier": notifier_schema.Settings,
        "fuse": fuse_config.Settings,
        "console": console_config.Settings,
    }
    others = (resources.Resource, receiver_settings.Receiver)
    references, definitions = msgspec.json.schema_components(
        [*shapes.values(), *others], ref_template="#/definitions/{name}"
    )
    for definition in definitions.values():
        # Python 3.13 removes the indentation of docstrings
        definition["description"] = inspect.cleandoc(definition["description"])
    *services, device, receiver = references
    # the chart mounts the Secret and passes the file to the service
    definitions["Secret"]["properties"]["secretRef"] = written["secretRef"]
    schema: _Object = written["values"]
    values = schema["properties"]
    values["settings"]["properties"] = dict(zip(shapes, services, strict=True))
    values["devices"]["items"], values["receivers"]["items"] = device, receiver
    return {**schema, "definitions": definitions}


def _known(schema: _Object) -> _Object:
    """Return the names in a schema, for the template that suggests the nearest name."""
    definitions = schema["definitions"]
    return {
        "values": _names(schema),
        "definitions": {name: _names(inner) for name, inner in definitions.items()},
    }


def _names(schema: _Object) -> object:
    """Return the names that a schema allows, as a tree.

    The tree of a list has one item; a string names a definition; None means any name.
    """
    for inner in schema.get("anyOf", []):
        if names := _names(inner):
            return names
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if isinstance(schema.get("items"), dict):
        return [_names(schema["items"])]
    properties = schema.get("properties")
    return properties and {name: _names(inner) for name, inner in properties.items()}


def _made(source: str, tree: _Object) -> bytes:
    # without shared parts, for which YAML would contain references
    apart = json.loads(json.dumps(tree))
    text = yaml.safe_dump(apart, sort_keys=False, width=1000)
    return f"# made by scripts/manifests.py from {source}\n{text}".encode()


def _compose() -> dict[Path, bytes]:
    """Return the settings files of the programs in compose.yaml, with its address of NATS."""
    trees = {
        "health": central_settings.health(
            nats="", kubeconfig="/etc/kubeconfig", plugin=stack.PLUGIN
        ),
        "labeler": central_settings.labeler(nats="", kubeconfig="/etc/kubeconfig"),
        "notifier": central_settings.notifier(
            nats="",
            webhook_url="http://webhook:8080/notifications",
            reach="private",
            console_url="http://127.0.0.1:8630",
        ),
        "console": central_settings.console(nats="", health="http://health:8080"),
    }
    for node in stack.NODES:
        trees[f"plugin-{node.name}"] = stack.plugin_settings(
            node,
            nats="",
            directory="/var/lib/kubelet",
            # some laptops have no /dev/fuse
            fuse_path="/dev/null",
            faults=f"/faults/{node.name}.jsonl",
        )
    return {Path("compose", f"{name}.yaml"): _settings(tree) for name, tree in trees.items()}


def _settings(tree: stack.Settings) -> bytes:
    kept = {key: value for key, value in tree.items() if key != "bus"}
    kept["http"] = {"host": "0.0.0.0", "port": 8080}  # noqa: S104  # in a container of its own
    text = yaml.safe_dump(kept, sort_keys=False)
    return f"# made by scripts/manifests.py from muster/local/stack.py\n{text}".encode()


def _accounts() -> dict[Path, bytes]:
    central = permissions.central()
    nodes = [permissions.plugin(vocabulary.node_token(node.name)) for node in stack.NODES]
    return {
        Path(place, "accounts.conf"): server_conf.accounts_conf([*central, *plugins]).encode()
        for place, plugins in (("k8s/base/nats", [permissions.gate()]), ("compose", nodes))
    }


def main() -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated manifests.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in documents().items()
        if not (ROOT / path).is_file() or (ROOT / path).read_bytes() != text
    ]
    for path, text in stale:
        if check:
            print(f"stale: {path}; run: make manifests")
        else:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_bytes(text)
            print(f"wrote {path}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

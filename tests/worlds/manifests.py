"""The manifests of overlays, components and the chart, rendered without a cluster."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
OVERLAYS: Final = ("minimal", "fuse", "gpu", "openshift", "production", "watch")
FOREIGN: Final = {"SecurityContextConstraints"}
"""Kinds that Kubernetes itself does not have."""
HOOK: Final = "helm.sh/hook"
CENTRAL: Final = ("health", "labeler", "notifier")

Object = dict[str, Any]


# without the cache, each object would read the megabyte of definitions again
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)


def validate(manifest: Object) -> None:
    """Raise if Kubernetes does not know the object, or a field of it, or deprecates it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def render(folder: Path) -> str:
    """Return the output of `kubectl kustomize` for a folder."""
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or "kubectl"
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@functools.cache
def rendered(overlay: str) -> str:
    """Return the output of `kubectl kustomize` for an overlay."""
    return render(ROOT / "k8s" / "overlays" / overlay)


def with_component(overlay: str, *components: str, where: Path) -> list[Object]:
    """Return every object of an overlay with added components, rendered in the folder `where`."""
    k8s = os.path.relpath(ROOT / "k8s", where)
    parts = {
        "resources": [f"{k8s}/overlays/{overlay}"],
        "components": [f"{k8s}/components/{component}" for component in components],
    }
    (where / "kustomization.yaml").write_text(json.dumps(parts))
    return [manifest for manifest in yaml.load_all(render(where), yaml.CSafeLoader) if manifest]


@functools.cache
def objects(overlay: str) -> tuple[Object, ...]:
    """Return every object of an overlay; they are cached, so callers must not change them."""
    return tuple(
        manifest for manifest in yaml.load_all(rendered(overlay), yaml.CSafeLoader) if manifest
    )


def only(overlay: str, kind: str, name: str) -> Object:
    """Return the one object of this kind and name."""
    matches = [o for o in objects(overlay) if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    assert len(matches) == 1, f"{kind} {name}: {len(matches)}"
    return matches[0]


def pods(overlay: str) -> dict[str, Object]:
    """Return the pod spec of every workload, by the workload's name."""
    return {
        o["metadata"]["name"]: o["spec"]["template"]["spec"]
        for o in objects(overlay)
        if "template" in o.get("spec", {})
    }


def file_in(overlay: str, map_prefix: str, name: str) -> str:
    """Return a file of the ConfigMap whose name is `map_prefix` and kustomize's hash."""
    (path,) = [
        o["data"][name]
        for o in objects(overlay)
        if o["kind"] == "ConfigMap" and o["metadata"]["name"].startswith(f"{map_prefix}-")
    ]
    return str(path)


def of_chart(values: Object, *, namespace: str = "muster", hooks: str = "") -> list[Object]:
    """Return the objects of the chart with these values.

    By default these are all objects except hooks; with `hooks`, only hooks whose type begins so.
    """
    helm = pytest.importorskip("helm_python", reason="no Helm: pip install helm-python-sdk")
    with contextlib.closing(helm.Chart.load(str(ROOT / "k8s/chart/muster"))) as chart:
        files = chart.render(values, name="muster", namespace=namespace)
    rendered = [
        manifest
        for name, text in files.items()
        if not name.endswith(".txt")
        for manifest in yaml.load_all(text, yaml.CSafeLoader)
        if manifest
    ]
    of_hooks = [(o, o["metadata"].get("annotations", {}).get(HOOK, "")) for o in rendered]
    return [o for o, hook in of_hooks if (hook.startswith(hooks) if hooks else not hook)]


def by_name(listed: Sequence[Object]) -> dict[tuple[str, str, str], Object]:
    """Return objects by kind, namespace and name, without hashes and with parsed settings."""
    plain = json.loads(
        re.sub(
            r'"(muster-(?:nats|console-writing|[a-z]+-settings))-[a-z0-9]{10}"',
            r'"\1"',
            json.dumps(listed),
        )
    )
    for manifest in plain:
        for name in manifest.get("data", {}):
            if name.endswith(".yaml"):
                manifest["data"][name] = yaml.safe_load(manifest["data"][name])
            else:
                manifest["data"][name] = manifest["data"][name].strip()
        manifest["metadata"].pop("creationTimestamp", None)
        if "template" in manifest.get("spec", {}):
            # the chart's checksums, which correspond to kustomize's hashes
            manifest["spec"]["template"]["metadata"].pop("annotations", None)
    return {
        (o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]): o for o in plain
    }

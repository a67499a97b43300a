"""Adapter: the generated part of what is deployed: nats-server's accounts, and the chart.

python scripts/manifests.py           write what is stale
python scripts/manifests.py --check   write nothing; exit 1 and name what is stale
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from muster import vocabulary
from muster.local import stack
from muster.nats.auth import permissions, server_conf
from muster_labeler.naming import label_forms
from scripts import dashboard

ROOT: Final = Path(__file__).resolve().parent.parent


_Object: TypeAlias = dict[str, Any]
_Key: TypeAlias = tuple[str, str]

_IN_CHART: Final = (
    (
        r"^(\s+)image: muster(?::0\.1\.0)?$",
        r'\1image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"',
    ),
    (
        r"^(\s+)image: docker\.io/library/nats:\S+$",
        r'\1image: "{{ .Values.nats.image.repository }}:{{ .Values.nats.image.tag }}"',
    ),
    (r"namespace: muster\b", r"namespace: {{ .Release.Namespace }}"),
    (r"serviceaccount:muster:", r"serviceaccount:{{ .Release.Namespace }}:"),
    (r"(kube-node-lease), muster\]", r"\1, {{ .Release.Namespace }}]"),
)

_PLUGIN: Final = re.compile(
    r"^kind: DaemonSet\nmetadata:(?: \{|\n(?: .*\n)* +)name: muster-plugin\b", re.MULTILINE
)

_FUSE: Final = "components/fuse-broker"
_FUSE_WEBHOOK: Final = "components/fuse-webhook"
_WATCH_RIGHTS: Final = "components/watch-rights"

# what a service reads when it starts; the plugin reads its settings again by itself
_READ: Final = {
    **{
        name: f"{{{{ toYaml .Values.settings.{name} | sha256sum }}}}"
        for name in ("health", "labeler", "notifier", "fuse")
    },
    "nats": '{{ (.Files.Glob "files/*.conf").AsConfig | sha256sum }}',
}
_POD: Final = re.compile(
    r"^    metadata:(?P<flow> \{|\n {6})(?=labels:(?: \{|\n {8})"
    r"app\.kubernetes\.io/name: muster-(?P<name>[a-z-]+))",
    re.MULTILINE,
)


_KEPT: Final = (
    "{name: device-plugins, mountPath: /var/lib/kubelet/device-plugins/muster, subPath: muster}"
)
_WATCHING: Final = (
    ("maxSurge: 10%", "maxSurge: {{ if .Values.watch.enabled }}0{{ else }}10%{{ end }}"),
    ("maxUnavailable: 0", "maxUnavailable: {{ if .Values.watch.enabled }}10%{{ else }}0{{ end }}"),
    (
        r"(\{name: (?:device-plugins|plugins-registry), mountPath: [^}]+)\}",
        r"\1{{ if .Values.watch.enabled }}, readOnly: true{{ end }}}",
    ),
    (
        r"(\n( +)name: (?:device-plugins|plugins-registry))(?=\n +- mountPath)",
        r"\1\n{{- if .Values.watch.enabled }}\n\2readOnly: true\n{{- end }}",
    ),
    (
        r"(\n +)(?=- (?:\{name: pod-resources, mountPath|mountPath: \S+/pod-resources\n))",
        rf"\n{{{{- if .Values.watch.enabled }}}}\1- {_KEPT}\n{{{{- end }}}}\1",
    ),
    (
        r"(\n( +)serviceAccountName: muster-plugin)",
        r"\1\n{{- if .Values.watch.hostPID }}\n\2hostPID: true\n{{- end }}",
    ),
)
"""What the overlay `watch` and the component `watch-processes` change, in both styles of YAML."""
_MADE: Final = re.compile(r"(    # made by .*\n)(?:.*\n)*(    # the end of what is made\n)")


def documents() -> dict[Path, bytes]:
    """Return every generated file by its path below the root."""
    # kustomize reads no file above its own folder
    base = (ROOT / "k8s/base/nats/nats.conf").read_bytes()
    again = {
        Path("k8s/overlays/production/base.conf"): base,
        Path("k8s/components/monitoring/muster.json"): dashboard.text().encode(),
    }
    accounts = _accounts()
    admission = _admission()
    return (
        accounts
        | {Path("k8s/base/admission.yaml"): admission.encode()}
        | _compose()
        | again
        | _chart(accounts[Path("k8s/base/nats/accounts.conf")], admission)
    )


def _admission() -> str:
    """Return the admission policy with the labels that the labeler may write."""
    forms = ",\n".join(
        f"        {json.dumps(key)}: {json.dumps(f'^({form})$')}"
        for key, form in label_forms.FORMS.items()
    )
    made = (
        f"    - name: forms\n      expression: >-\n        {{\n{forms}\n        }}\n"
        f"    - name: profileKey\n      expression: '\"^{label_forms.PROFILE_KEY}$\"'\n"
        f"    - name: profileLabel\n      expression: '\"^{label_forms.PROFILE_LABEL}$\"'\n"
    )
    text = (ROOT / "k8s/base/admission.yaml").read_text("utf-8")
    return _MADE.sub(lambda match: f"{match[1]}{made}{match[2]}", text)


def _chart(accounts: bytes, admission: str) -> dict[Path, bytes]:
    """Return the part of the Helm chart that says what the base says."""
    base, chart = ROOT / "k8s/base", Path("k8s/chart/muster")
    files = {
        chart / "files/nats.conf": (base / "nats/nats.conf").read_bytes(),
        chart / "files/accounts.conf": accounts,
        chart / "files/monitoring/muster.json": dashboard.text().encode(),
    }
    for name in ("podmonitor.yaml", "rules.yaml"):
        there = ROOT / "k8s/components/monitoring" / name
        files[chart / "files/monitoring" / name] = there.read_bytes()
    others = _of_production()
    for file in sorted(base.glob("*.yaml")):
        if file.name not in {"kustomization.yaml", "namespace.yaml"}:
            source = admission if file.name == "admission.yaml" else file.read_text("utf-8")
            parts = source.rstrip().split("\n---\n")
            text = "\n---\n".join(
                f"{{{{- if not .Values.production.enabled }}}}\n{part}\n{{{{- end }}}}"
                if _key(yaml.safe_load(part)) in others
                else part
                for part in parts
            )
            files[chart / "templates" / file.name] = _template(f"{text}\n", f"k8s/base/{file.name}")
    files[chart / "files/production.conf"] = (
        ROOT / "k8s/overlays/production/nats.conf"
    ).read_bytes()
    rendered = yaml.safe_dump_all(others.values(), sort_keys=False, width=1000)
    whole = f"{{{{- if .Values.production.enabled }}}}\n{rendered}{{{{- end }}}}\n"
    files[chart / "templates/production.yaml"] = _template(whole, "k8s/overlays/production")
    files[chart / "templates/fuse.yaml"] = _fuse()
    webhook = "\n---\n".join(_parts(_FUSE_WEBHOOK))
    whole = f"{{{{- if .Values.fuse.webhook.enabled }}}}\n{webhook}\n{{{{- end }}}}\n"
    files[chart / "templates/fuse-webhook.yaml"] = _template(whole, f"k8s/{_FUSE_WEBHOOK}")
    rights = "\n---\n".join(_parts(_WATCH_RIGHTS))
    whole = f"{{{{- if .Values.watch.enabled }}}}\n{rights}\n{{{{- end }}}}\n"
    files[chart / "templates/watch.yaml"] = _template(whole, f"k8s/{_WATCH_RIGHTS}")
    settings = {
        name: yaml.safe_load((base / f"settings/{name}.yaml").read_text("utf-8"))
        for name in ("plugin", "health", "labeler", "notifier")
    }
    settings["fuse"] = yaml.safe_load((ROOT / "k8s" / _FUSE / "fuse.yaml").read_text("utf-8"))
    # the chart says where it is installed
    for plugin in settings["health"]["cluster"]["plugins"]:
        del plugin["namespace"]
    ((nats, tag),) = re.findall(r"image: (\S+/nats):(\S+)", (base / "nats.yaml").read_text("utf-8"))
    values = {
        "image": {"repository": "muster", "tag": "0.1.0"},
        "nats": {"image": {"repository": nats, "tag": tag}},
        "monitoring": {"enabled": False},
        "production": {"enabled": False},
        "fuse": {"enabled": False, "webhook": {"enabled": False}},
        "watch": {
            "enabled": False,
            "expect": {},
            "ignore": [],
            "drivers": False,
            "hostPID": False,
        },
        "settings": settings,
    }
    text = yaml.safe_dump(values, sort_keys=False)
    files[chart / "values.yaml"] = f"# made by scripts/manifests.py from k8s/base\n{text}".encode()
    return files


def _fuse() -> bytes:
    """Return the manifests of the FUSE broker, with TLS for production."""
    with_tls = _rendered("overlays/production", components=[_FUSE, f"{_FUSE}-tls"])
    texts = []
    for part in _parts(_FUSE):
        tree = yaml.safe_load(part)
        in_production = with_tls[_key(tree)]
        if tree["kind"] == "DaemonSet":
            rendered = yaml.safe_dump(in_production, sort_keys=False, width=1000)
            texts.append(
                f"{{{{- if not .Values.production.enabled }}}}\n{part}\n"
                f"{{{{- else }}}}\n{rendered}{{{{- end }}}}"
            )
        else:
            assert tree == in_production, "only the address of NATS differs"
            texts.append(part)
    text = "\n---\n".join(texts)
    whole = f"{{{{- if .Values.fuse.enabled }}}}\n{text}\n{{{{- end }}}}\n"
    return _template(whole, f"k8s/{_FUSE}")


def _parts(component: str) -> list[str]:
    """Return the objects of a component as its files have them."""
    return [
        part
        for file in sorted((ROOT / "k8s" / component).glob("*.yaml"))
        for part in file.read_text("utf-8").rstrip().split("\n---\n")
        if "kind" in (tree := yaml.safe_load(part)) and tree["kind"] != "Component"
    ]


def _template(text: str, source: str) -> bytes:
    """Return manifests as Helm reads them."""
    text = "\n---\n".join(
        _watching(part) if _PLUGIN.search(part) else part for part in text.split("\n---\n")
    )
    for pattern, put in _IN_CHART:
        text = re.sub(pattern, put, text, flags=re.MULTILINE)
    text = _POD.sub(_with_checksum, text)
    return f"{{{{- /* made by scripts/manifests.py from {source} */ -}}}}\n{text}".encode()


def _watching(text: str) -> str:
    """Return the plugin's DaemonSet with what the values of `watch` change in it."""
    for pattern, put in _WATCHING:
        text = re.sub(pattern, put, text)
    component = ROOT / "k8s/components/watch-drivers/kustomization.yaml"
    (patch,) = yaml.safe_load(component.read_text("utf-8"))["patches"]
    operations = yaml.safe_load(patch["patch"])
    for name in ("volumeMounts", "volumes"):
        (match,) = re.finditer(rf"\n +{name}:(?=(\n +)- )", text)
        added = "".join(
            f"{match[1]}- {json.dumps(operation['value'])}"
            for operation in operations
            if operation["path"].split("/")[-2] == name
        )
        block = f"\n{{{{- if .Values.watch.drivers }}}}{added}\n{{{{- end }}}}"
        text = f"{text[: match.end()]}{block}{text[match.end() :]}"
    return text


def _with_checksum(match: re.Match[str]) -> str:
    """Return the beginning of a pod's metadata, so that what it reads at its start restarts it."""
    if match["name"] not in _READ:
        return match[0]
    end = ", " if match["flow"] == " {" else "\n      "
    return f"{match[0]}annotations: {{checksum/settings: '{_READ[match['name']]}'}}{end}"


def _of_production() -> dict[_Key, _Object]:
    """Return what the overlay of production has and the minimal one has not, or otherwise."""
    minimal, production = _rendered("overlays/minimal"), _rendered("overlays/production")
    return {
        key: item
        for key, item in production.items()
        # the chart makes ConfigMaps itself
        if item != minimal.get(key) and key[0] != "ConfigMap"
    }


def _rendered(resource: str, components: Sequence[str] = ()) -> dict[_Key, _Object]:
    """Return the objects of a folder below k8s, with components, and no hashes in their names."""
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or "kubectl"
    with tempfile.TemporaryDirectory() as where:
        k8s = os.path.relpath(ROOT / "k8s", where)
        parts = {
            "resources": [f"{k8s}/{resource}"],
            "components": [f"{k8s}/{component}" for component in components],
        }
        Path(where, "kustomization.yaml").write_text(json.dumps(parts), "utf-8")
        command = [kubectl, "kustomize", where]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  # ours
    text = re.sub(
        r"\b(muster-(?:nats|[a-z]+-settings))-[a-z0-9]{10}$", r"\1", text, flags=re.MULTILINE
    )
    return {_key(item): item for item in yaml.safe_load_all(text)}


def _key(item: _Object) -> _Key:
    return item["kind"], item["metadata"]["name"]


def _compose() -> dict[Path, bytes]:
    """Return the settings of each program of compose.yaml; the address of NATS is in there."""
    trees = {
        "health": stack.health_settings(nats="", kubeconfig="/etc/kubeconfig"),
        "labeler": stack.labeler_settings(nats="", kubeconfig="/etc/kubeconfig"),
        "notifier": stack.notifier_settings(
            nats="", webhook_url="http://webhook:8080/notifications", reach="private"
        ),
    }
    for node in stack.NODES:
        trees[f"plugin-{node.name}"] = stack.plugin_settings(
            node,
            nats="",
            directory="/var/lib/kubelet",
            # not every laptop has /dev/fuse
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
    parser = argparse.ArgumentParser(description="Make what is generated of what is deployed.")
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

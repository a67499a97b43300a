"""Door to the generated part of what is deployed: nats-server's accounts, and the chart.

python scripts/manifests.py           write what is stale
python scripts/manifests.py --check   write nothing; exit 1 and name what is stale
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Final

import yaml

from muster import permissions, vocabulary
from muster.local import layout
from scripts import dashboard

ROOT: Final = Path(__file__).resolve().parent.parent


_IN_CHART: Final = (
    (r"^(\s+)image: muster$", r'\1image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"'),
    (r"namespace: muster\b", r"namespace: {{ .Release.Namespace }}"),
    (r"serviceaccount:muster:", r"serviceaccount:{{ .Release.Namespace }}:"),
)


def documents() -> dict[Path, bytes]:
    """Return every generated file by its path below the root."""
    # kustomize reads no file above its own folder
    base = (ROOT / "k8s/base/nats/nats.conf").read_bytes()
    again = {
        Path("k8s/overlays/production/base.conf"): base,
        Path("k8s/components/monitoring/muster.json"): dashboard.text().encode(),
    }
    accounts = _accounts()
    return accounts | _compose() | again | _chart(accounts[Path("k8s/base/nats/accounts.conf")])


def _chart(accounts: bytes) -> dict[Path, bytes]:
    """Return the part of the Helm chart that says what the base says."""
    base, chart = ROOT / "k8s/base", Path("k8s/chart/muster")
    found = {
        chart / "files/nats.conf": (base / "nats/nats.conf").read_bytes(),
        chart / "files/accounts.conf": accounts,
        chart / "files/monitoring/muster.json": dashboard.text().encode(),
    }
    for name in ("podmonitor.yaml", "rules.yaml"):
        there = ROOT / "k8s/components/monitoring" / name
        found[chart / "files/monitoring" / name] = there.read_bytes()
    for file in sorted(base.glob("*.yaml")):
        if file.name not in {"kustomization.yaml", "namespace.yaml"}:
            text = file.read_text("utf-8")
            assert "{{" not in text, f"{file}: Helm would read it"
            for pattern, put in _IN_CHART:
                text = re.sub(pattern, put, text, flags=re.MULTILINE)
            found[chart / "templates" / file.name] = (
                f"{{{{- /* made by scripts/manifests.py from k8s/base/{file.name} */ -}}}}\n{text}"
            ).encode()
    told = {
        name: yaml.safe_load((base / f"settings/{name}.yaml").read_text("utf-8"))
        for name in ("plugin", "health", "labeler", "notifier")
    }
    values = {
        "image": {"repository": "muster", "tag": "0.1.0"},
        "monitoring": {"enabled": False},
        "settings": told,
    }
    text = yaml.safe_dump(values, sort_keys=False)
    found[chart / "values.yaml"] = f"# made by scripts/manifests.py from k8s/base\n{text}".encode()
    return found


def _compose() -> dict[Path, bytes]:
    """Return the settings of each program of compose.yaml; the address of NATS is in there."""
    found = {
        "health": layout.health_settings(nats=""),
        "labeler": layout.labeler_settings(nats="", kubeconfig="/etc/kubeconfig"),
        "notifier": layout.notifier_settings(
            nats="", webhook_url="http://webhook:8080/notifications", reach="private"
        ),
    }
    for node in layout.NODES:
        found[f"plugin-{node.name}"] = layout.plugin_settings(
            node,
            nats="",
            directory="/var/lib/kubelet",
            # not every laptop has /dev/fuse
            fuse_path="/dev/null",
            faults=f"/faults/{node.name}.jsonl",
        )
    return {Path("compose", f"{name}.yaml"): _settings(tree) for name, tree in found.items()}


def _settings(tree: layout.Settings) -> bytes:
    kept = {key: value for key, value in tree.items() if key != "bus"}
    kept["http"] = {"host": "0.0.0.0", "port": 8080}  # noqa: S104  # in a container of its own
    text = yaml.safe_dump(kept, sort_keys=False)
    return f"# made by scripts/manifests.py from muster/local/layout.py\n{text}".encode()


def _accounts() -> dict[Path, bytes]:
    central = permissions.central()
    nodes = [permissions.plugin(vocabulary.node_token(node.name)) for node in layout.NODES]
    return {
        Path(place, "accounts.conf"): permissions.configuration([*central, *plugins]).encode()
        for place, plugins in (("k8s/base/nats", [permissions.any_plugin()]), ("compose", nodes))
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

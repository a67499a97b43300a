"""Adapter for files: writes the images' bills of materials (CycloneDX 1.6) from the lock files.

python scripts/sbom.py    write build/<image>.cdx.json for each image
"""

import json
import re
import sys
from pathlib import Path
from typing import Final

import muster

ROOT: Final = Path(__file__).resolve().parent.parent
IMAGES: Final = ("services", "node", "laptop")
OURS: Final = "muster-k8s"

Tree = dict[str, object]
_LOCKED = re.compile(
    r"^([a-z0-9.-]+)==([^\s;\\]+)(?: *; *([^\\\n]+?))? *\\?\n((?: +--hash=.*\n)+)", re.MULTILINE
)


def locked(text: str) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Return name, version, marker and hashes of each package in a lock file."""
    return [
        (name, version, marker, tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", hashes)))
        for name, version, marker, hashes in _LOCKED.findall(text)
    ]


def bill(image: str, text: str) -> Tree:
    """Return the bill of materials of an image; it depends only on the lock file."""
    parts = [_component(*package) for package in locked(text)]
    ours = f"pkg:pypi/{OURS}@{muster.__version__}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "name": "muster" if image == "services" else f"muster-{image}",
                "version": muster.__version__,
                "bom-ref": ours,
                "purl": ours,
            }
        },
        "components": parts,
        "dependencies": [{"ref": ours, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def _component(name: str, version: str, marker: str, hashes: tuple[str, ...]) -> Tree:
    """Return the component for a package; each hash is that of its file for one platform."""
    where = f"pkg:pypi/{name}@{version}"
    component: Tree = {
        "type": "library",
        "bom-ref": where,
        "name": name,
        "version": version,
        "purl": where,
        "scope": "required",
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in hashes],
    }
    if marker:
        component["properties"] = [{"name": "muster:marker", "value": marker}]
    return component


def main() -> int:
    """Write the file of each image; return the exit code."""
    for image in IMAGES:
        text = (ROOT / "requirements" / f"{image}.lock").read_text("utf-8")
        file = ROOT / "build" / f"{image}.cdx.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(bill(image, text), indent=1) + "\n")
        print(f"wrote {file.relative_to(ROOT)}: {len(locked(text))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())

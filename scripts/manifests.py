"""Door to the generated part of what is deployed: nats-server's accounts, and the chart.

python scripts/manifests.py           write what is stale
python scripts/manifests.py --check   write nothing; exit 1 and name what is stale
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from muster import permissions, vocabulary
from muster.local import layout

ROOT: Final = Path(__file__).resolve().parent.parent


def documents() -> dict[Path, bytes]:
    """Return every generated file by its path below the root."""
    return _accounts()


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

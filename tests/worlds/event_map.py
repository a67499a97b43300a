"""The table of events in services/README.md."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("plugin", "fuse", "labeler", "health", "notifier", "gate", "console")


def table() -> dict[str, tuple[str, str, set[str]]]:
    """Return the map's rows: event -> (subject, from, to)."""
    rows = {}
    for line in (ROOT / "services" / "README.md").read_text("utf-8").splitlines():
        row = re.fullmatch(r"\| `(\w+)` \| `([^`]+)` \| ([^|]*) \| ([^|]*) \|", line)
        if row:
            rows[row[1]] = (
                row[2],
                row[3],
                {service for service in SERVICES if service in row[4].split(", ")},
            )
    return rows

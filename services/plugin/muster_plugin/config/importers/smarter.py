"""Pure: imports the configuration of smarter-device-manager (v1.20; main.go, findDevicesPattern).

A list of `{devicematch, nummaxdevices}`: a Go regular expression on the path below /dev, unanchored
unless written so, and how many ids each match gets. Each match is a resource of its own, named
after its path; containers get the node with `rw`.
"""

from typing import Final

from muster_plugin.config import resources
from muster_plugin.config.importers import peer_file
from muster_plugin.model import errors

DOMAIN: Final = "smarter-devices"

_JETSON: Final = "nvidia-gpu"
_GENERAL: Final = (
    "devices are found as they come and go; smarter reads /dev once, at its start",
    "a device that vanishes is Unhealthy; smarter keeps allocating its path",
    "device ids are stable and name the device (video0-3); smarter's are 0 to N-1",
    "a name that the kubelet would refuse is shortened and made unique; smarter's is refused",
    "containers also get MUSTER_DEVICES_<RESOURCE>, which names their devices; env: '' omits it",
)


def read(entries: object) -> peer_file.ImportedConfiguration:
    """Return the configuration of a list of smarter's. Raises peer_file.ImportRejected."""
    reader = peer_file.Reader("smarter")
    by_pattern: dict[str, resources.Resource] = {}
    for at, item in enumerate(reader.items(entries, "")):
        path, before = f"[{at}]", len(reader.problems)
        entry = reader.mapping(item, path, ("devicematch", "nummaxdevices"))
        pattern = reader.text(entry.get("devicematch"), f"{path}.devicematch")
        count = reader.whole(entry.get("nummaxdevices"), f"{path}.nummaxdevices")
        if len(reader.problems) > before:
            continue
        resource = _resource(reader, path, pattern, count)
        if resource and pattern in by_pattern:
            repeated = f"devicematch {errors.quoted(pattern)} is listed twice"
            reader.note_difference(path, f"{repeated}; the later one is kept, as the kubelet does")
        if resource:
            by_pattern[pattern] = resource
    if not by_pattern and not reader.problems:
        reader.reject("", "there is no device to import")
    reader.differences.extend(_GENERAL)
    return reader.imported([*by_pattern.values()])


def _resource(
    reader: peer_file.Reader, path: str, pattern: str, count: int
) -> resources.Resource | None:
    if pattern == _JETSON:
        reader.note_difference(
            path, "Jetson GPUs (/sys/devices/gpu.N) are not device nodes; left out"
        )
        return None
    if not pattern:
        reader.reject(f"{path}.devicematch", "missing; smarter then takes everything in /dev")
        return None
    if not count:
        reader.note_difference(
            path, f"{errors.quoted(pattern)} has nummaxdevices 0, so no device; left out"
        )
        return None
    if not (pattern.startswith("^") and pattern.endswith("$")):
        reader.note_difference(
            path,
            f"devicematch {errors.quoted(pattern)} is not anchored: it matches any part of a path "
            "below /dev, with smarter and here; ^ and $ make it exact",
        )
    return reader.resource(
        {
            "name": f"{DOMAIN}/*",
            "perMatch": True,
            "groups": [{"devices": [{"regex": pattern}], "count": count}],
        },
        path,
        {
            "groups[0].devices[0].regex": f"{path}.devicematch",
            "groups[0].count": f"{path}.nummaxdevices",
        },
    )

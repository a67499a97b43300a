"""Pure: imports several configurations of NVIDIA's plugin, each selected by a node label.

NVIDIA's config-manager, a second container of the plugin's pods, reads the node's label
`nvidia.com/device-plugin.config` and picks the ConfigMap's key of that name
(cmd/config-manager/main.go). Nodes without the label use the default: DEFAULT_CONFIG or, with the
chart's fallback strategies, the key `default`. Flags and variables override all of these
configurations.
"""

import re
from collections.abc import Sequence
from typing import Final

from muster_plugin.config import settings
from muster_plugin.config.importers import base, nvidia
from muster_plugin.model import errors

LABEL: Final = "nvidia.com/device-plugin.config"
_NAMED: Final = "default"
_VALUE: Final = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_NODES_MAX: Final = 100
_TOLD: Final = (
    f"the plugin cannot read its node's label {LABEL}: `muster config daemonsets` creates one "
    f"DaemonSet for each value (docs/migration.md)"
)


def read(
    files: Sequence[tuple[str, object]],
    default: str,
    arguments: Sequence[str],
    environment: nvidia.Variables,
    elsewhere: Sequence[str],
) -> base.ImportedConfiguration:
    """Return the default configuration; the others become overrides. Raises ImportRejected.

    `default` is empty if neither the user nor the manifests name a default.
    """
    names = [name for name, _ in files]
    problems = [f"{name}: two configurations have this name" for name in errors.duplicates(names)]
    chosen = default or _NAMED
    if chosen not in names:
        known = ", ".join(names)
        problems.append(
            f"{chosen}: no such configuration; available: {known}"
            if default
            else f"several configurations: {known}; name the one for nodes without the label "
            f"{LABEL} with `muster config import --default`, or call it `{_NAMED}`"
        )
    imported: dict[str, base.ImportedConfiguration] = {}
    for name, document in files:
        try:
            imported[name] = nvidia.read(document, arguments, environment, elsewhere)
        except base.ImportRejected as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    others = [name for name in names if name != chosen]
    problems += [f"{name}: no label can have this value" for name in others if not _is_label(name)]
    if len(others) > _NODES_MAX:
        problems.append(f"{len(names)} configurations; use at most {_NODES_MAX + 1}")
    if problems:
        raise base.ImportRejected(problems)
    rules = settings.Document(
        api_version=settings.API_VERSION,
        gpus=imported[chosen].rules.gpus,
        nodes=tuple(
            settings.NodeOverride(match={LABEL: name}, gpus=imported[name].rules.gpus)
            for name in others
        ),
    )
    unknown = f"an unknown label value selects {chosen}; NVIDIA's plugin does not start"
    differences = _merged({name: each.differences for name, each in imported.items()})
    return base.ImportedConfiguration(
        rules=rules,
        differences=(f"nodes: {_TOLD}", f"nodes: {unknown}", *differences),
        losses=_merged({name: each.losses for name, each in imported.items()}),
    )


def _is_label(name: str) -> bool:
    return _VALUE.fullmatch(name) is not None


def _merged(lines: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return each configuration's own lines, prefixed with its name, then the common lines."""
    common = set.intersection(*map(set, lines.values()))
    own = [f"{name}: {line}" for name, each in lines.items() for line in each if line not in common]
    first = next(iter(lines.values()))
    return (*own, *(line for line in first if line in common))

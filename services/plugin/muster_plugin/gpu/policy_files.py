"""Adapter: reads the XID policy: the presets that ship with muster, and the user's own file."""

import functools
from pathlib import Path
from typing import Final

from muster.service import logs, settings
from muster_plugin.config import gpus
from muster_plugin.gpu import xid_policy

_PACKAGE: Final = Path(__file__).parents[1]
_BYTES_MAX: Final = 1024 * 1024
_LOGGED_MAX: Final = 100


def read(rules: gpus.Health) -> xid_policy.Policy:
    """Return the configured policy. Raises settings.BadSettings with every problem."""
    return xid_policy.Policy(
        xid_policy.catalogue((_PACKAGE / xid_policy.CATALOGUE).read_bytes()),
        xid_policy.preset((_PACKAGE / xid_policy.preset_file(rules.preset)).read_bytes()),
        overrides=_overrides(Path(rules.policy)) if rules.policy else None,
        disable=rules.disable,
        enable=rules.enable,
    )


def load(rules: gpus.Health) -> xid_policy.Policy:
    """Return the configured policy, and log each of its problems once. Raises BadSettings."""
    policy = read(rules)
    for problem in policy.problems:
        _log(problem)
    return policy


@functools.lru_cache(_LOGGED_MAX)
def _log(problem: str) -> None:
    logs.logger().warning("policy_problem", problem=problem)


def _overrides(file: Path) -> xid_policy.Overrides:
    if file.is_fifo():
        raise settings.BadSettings([f"{file}: not a regular file"])
    try:
        with file.open("rb") as opened:
            text = opened.read(_BYTES_MAX + 1)
    except OSError as error:
        raise settings.BadSettings([f"{file}: {error.strerror}"]) from None
    documents = settings.parse(text, source=str(file))
    try:
        return settings.validate(xid_policy.Overrides, documents[0] if documents else {})
    except settings.BadSettings as error:
        raise settings.BadSettings([f"{file}: {problem}" for problem in error.problems]) from None

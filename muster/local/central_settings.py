"""Pure: the settings of the central services for `muster up` and Docker Compose.

With them, a fault is reported within seconds; the defaults, for a cluster, are slower.
"""

from collections.abc import Mapping
from typing import Final

Settings = Mapping[str, object]

RECEIVERS: Final = ("console", "webhook")
"""The names of the receivers that always exist: the notifier's log, the webhook stand-in."""


def health(*, nats: str, kubeconfig: str, plugin: str) -> Settings:
    """Return the settings of health; `patience_s` is 0, because here silence is always a fault."""
    return {
        "bus": {"url": nats},
        "detection": {"patience_s": 0},
        "cluster": {
            "kubeconfig": kubeconfig,
            "plugins": [{"plugin": plugin, "nodes": {"kubernetes.io/os": "linux"}}],
        },
    }


def labeler(*, nats: str, kubeconfig: str) -> Settings:
    """Return the settings of the labeler, which only suggests labels."""
    return {"bus": {"url": nats}, "mode": "suggest", "kubernetes": {"kubeconfig": kubeconfig}}


def notifier(
    *,
    nats: str,
    webhook_url: str,
    reach: str = "loopback",
    console_url: str = "",
    receivers_directory: str = "",
) -> Settings:
    """Return the settings of the notifier, which notifies its log and the webhook stand-in.

    Notifications link to the console at `console_url`. Further receivers are in
    `receivers_directory`.
    """
    return {
        "bus": {"url": nats},
        "group_wait_s": 0.5,
        "group_interval_s": 1.0,
        "receivers": [
            {"name": RECEIVERS[0], "console": {}},
            {"name": RECEIVERS[1], "webhook": {"url": webhook_url, "reach": reach}},
        ],
        **({"console_url": console_url} if console_url else {}),
        **({"receivers_directory": receivers_directory} if receivers_directory else {}),
    }


def console(*, nats: str, health: str, is_local: bool = False) -> Settings:
    """Return the settings of the console; if `is_local`, its own user may act in it."""
    settings: dict[str, object] = {"bus": {"url": nats}, "health": [health]}
    return {**settings, "writing": {"local": True}} if is_local else settings

"""Pure: plans what `muster notify setup` writes: one receiver in the notifier's receivers Secret.

The Secret has two keys for each receiver: `NAME.yaml` for its settings, and `NAME.secret` for its
secret, if it has one. Each receiver has a separate field manager, so that adding a receiver never
removes another. With a receivers directory, the same keys are the names of files.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster import escaping
from muster_notifier.config import receiver_settings, schema

SUFFIX: Final = ".yaml"
"""The suffix of the files with receivers' settings, in the Secret and in `receivers_directory`."""
_URLS: Final = ("https://", "http://")
Tree = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A receiver to add: its name, its settings without the name, and its secret or empty."""

    name: str
    settings: Tree
    secret: str

    @property
    def manager(self) -> str:
        """Return the field manager that owns this receiver's keys in the Secret."""
        return f"muster-notify-{self.name}"

    def files(self) -> dict[str, str]:
        """Return the receiver's files by name; the names are the keys in the Secret."""
        files = {f"{self.name}{SUFFIX}": escaping.yaml_of(self.settings)}
        return files | ({_secret_file(self.name): self.secret} if self.secret else {})

    def manifest(self, *, secret: str, namespace: str) -> Tree:
        """Return the Secret with only this receiver's keys, for server-side apply."""
        encoded = {
            key: base64.b64encode(text.encode()).decode() for key, text in self.files().items()
        }
        labels = {"app.kubernetes.io/part-of": "muster"}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": secret, "namespace": namespace, "labels": labels},
            "data": encoded,
        }

    def refusal(self, present: Mapping[str, bytes], *, replaces: bool) -> str:
        """Return why the receiver cannot be added to the keys in `present`; empty if it can."""
        own = {key: text.encode() for key, text in self.files().items()}
        before = {key: value for key, value in present.items() if key in _keys(self.name)}
        if f"{self.name}{SUFFIX}" in before and before != own and not replaces:
            return f"there is already a receiver {self.name}: pass another --name, or --replace"
        others = {key for key in present if key.endswith(SUFFIX)} - own.keys()
        if len(others) >= schema.RECEIVERS_MAX:
            return f"there are already {len(others)} receivers, which is the maximum"
        return ""


def slack(name: str, secret: str, *, channel: str, reach: receiver_settings.Reach) -> Plan:
    """Plan a Slack receiver; the secret is a bot token, or the URL of an incoming webhook."""
    if is_slack_webhook(secret):
        settings: Tree = {"webhook_from": _from(name)}
    else:
        settings = {"token_from": _from(name), "channel": channel}
    return Plan(name=name, settings={"slack": settings | _reach(reach)}, secret=secret)


def is_slack_webhook(secret: str) -> bool:
    """Return whether the secret is the URL of an incoming webhook, which has a fixed channel."""
    return secret.startswith(_URLS)


def pagerduty(name: str, secret: str, *, url: str, reach: receiver_settings.Reach) -> Plan:
    """Plan a PagerDuty receiver; the secret is the routing key of its service.

    `url` is the address of PagerDuty's API; if it is empty, the default is used.
    """
    own = {"url": url} if url else {}
    settings = {"routing_key_from": _from(name), **own, **_reach(reach)}
    return Plan(name=name, settings={"pagerduty": settings}, secret=secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """How mail is sent; without a username, no password is sent."""

    host: str
    port: int
    sender: str
    to: tuple[str, ...]
    tls: receiver_settings.Tls
    username: str


def email(name: str, secret: str, mail: Mail) -> Plan:
    """Plan a mail receiver; the secret is the password, and is ignored without a username."""
    login = {"username": mail.username, "password_from": _from(name)} if mail.username else {}
    settings = {
        "host": mail.host,
        "port": mail.port,
        "sender": mail.sender,
        "to": list(mail.to),
        "tls": mail.tls.value,
        **login,
    }
    return Plan(name=name, settings={"email": settings}, secret=secret if mail.username else "")


def teams(name: str, secret: str, *, reach: receiver_settings.Reach) -> Plan:
    """Plan a Microsoft Teams receiver; the secret is the URL of a workflow."""
    settings: Tree = {"url_from": _from(name), **_reach(reach)}
    return Plan(name=name, settings={"teams": settings}, secret=secret)


def webhook(name: str, secret: str, *, url: str, reach: receiver_settings.Reach) -> Plan:
    """Plan a webhook; the secret is the URL; with `url`, it is the signing key, or empty."""
    keys = {"secrets": [_from(name)]} if secret else {}
    settings: Tree = {"url": url, **keys} if url else {"url_from": _from(name)}
    return Plan(name=name, settings={"webhook": settings | _reach(reach)}, secret=secret)


def _secret_file(name: str) -> str:
    return f"{name}.secret"


def _keys(name: str) -> tuple[str, str]:
    return f"{name}{SUFFIX}", _secret_file(name)


def _from(name: str) -> Tree:
    return {"file": _secret_file(name)}


def _reach(reach: receiver_settings.Reach) -> Tree:
    return {} if reach is receiver_settings.Reach.PUBLIC else {"reach": reach.value}

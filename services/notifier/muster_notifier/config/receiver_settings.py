"""Pure: the settings of receivers: one section for each kind.

Settings never contain secrets: a setting names the file or variable that contains the secret.
"""

import enum
import re
from typing import Annotated, Final

import msgspec

from muster import vocabulary
from muster.service import sections

Rate = Annotated[float, msgspec.Meta(gt=0, le=1_000)]
Burst = Annotated[int, msgspec.Meta(ge=1, le=1_000)]
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/?#]+[^\s]*$", max_length=2048)]
RetryFor = Annotated[float, msgspec.Meta(ge=0, le=7 * 86_400)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=20_000)]
MailName = Annotated[str, msgspec.Meta(min_length=3, max_length=254)]
MailNames = Annotated[tuple[MailName, ...], msgspec.Meta(min_length=1, max_length=100)]

_MAIL: Final = re.compile(
    # an address with or without a name before it, on one line
    r"[^\s@<>,\x00-\x1f]+@[^\s@<>,\x00-\x1f]+|[^@<>,\x00-\x1f]*<[^\s@<>,]+@[^\s@<>,]+>"
)
WAYS: Final = (
    "webhook",
    "slack",
    "pagerduty",
    "email",
    "teams",
    "alertmanager",
    "kubernetes",
    "apprise",
    "file",
    vocabulary.CONSOLE,
)


class Reach(enum.StrEnum):
    """Which addresses requests may reach; link-local addresses are never allowed.

    `private` also allows public addresses, and `loopback` allows private and public ones.
    """

    PUBLIC = "public"
    PRIVATE = "private"
    LOOPBACK = "loopback"


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    """Where to read a secret: a file, a key in a YAML file, or an environment variable.

    `at` is a path of keys in the file, such as `receivers.0.slack_configs.0.api_url`.
    """

    file: str | None = None
    at: str | None = None
    env: str | None = None

    def __post_init__(self) -> None:
        """Refuse a secret that has no source or two sources, and `at` without a file."""
        if (self.file is None) == (self.env is None):
            raise ValueError("set exactly one of: file, env")
        if self.at is not None and self.file is None:
            raise ValueError("at: requires file")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's URL; use `url_from` for a URL that contains a secret."""

    url: Url | None = None
    url_from: Secret | None = None
    reach: Reach = Reach.PUBLIC
    timeout_s: sections.Period = 5.0

    def __post_init__(self) -> None:
        """Refuse an address that has no URL or two URLs, and a `url` that contains a password."""
        if (self.url is None) == (self.url_from is None):
            raise ValueError("set exactly one of: url, url_from")
        if self.url is not None and "@" in self.url.partition("://")[2].partition("/")[0]:
            raise ValueError("url: contains a password; use url_from instead")


class Format(enum.StrEnum):
    """The format of a webhook's body."""

    CLOUDEVENTS = "cloudevents"
    ALERTMANAGER = "alertmanager"


class Webhook(Address, frozen=True, kw_only=True):
    """An HTTP receiver. With `secrets` (two during a rotation), bodies are signed."""

    format: Format = Format.CLOUDEVENTS
    secrets: Annotated[tuple[Secret, ...], msgspec.Meta(max_length=2)] = ()
    bearer_from: Secret | None = None
    max_alerts: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    """The maximum number of alerts in a body; 0: as many as fit. Other alerts are only counted."""


class Slack(msgspec.Struct, frozen=True, kw_only=True):
    """A Slack channel, with a bot token (one message per group, edited in place) or a webhook."""

    token_from: Secret | None = None
    channel: Annotated[str, msgspec.Meta(max_length=200)] = ""
    webhook_from: Secret | None = None
    url: Url = "https://slack.com/api"
    reach: Reach = Reach.PUBLIC
    timeout_s: sections.Period = 5.0

    def __post_init__(self) -> None:
        """Refuse settings that have no secret or two secrets, and a token without a channel."""
        if (self.token_from is None) == (self.webhook_from is None):
            raise ValueError("set exactly one of: token_from, webhook_from")
        if self.token_from is not None and not self.channel:
            raise ValueError("channel: required with token_from")


class PagerDuty(msgspec.Struct, frozen=True, kw_only=True):
    """A PagerDuty service, with its Events API v2 integration."""

    routing_key_from: Secret
    url: Url = "https://events.pagerduty.com/v2/enqueue"
    reach: Reach = Reach.PUBLIC
    timeout_s: sections.Period = 5.0


class Tls(enum.StrEnum):
    """How mail is encrypted: STARTTLS (required), implicit TLS, or none."""

    STARTTLS = "starttls"
    IMPLICIT = "implicit"
    NONE = "none"


class Email(msgspec.Struct, frozen=True, kw_only=True):
    """Mail through a relay, which may be in a private network, because the operator chooses it."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 587
    sender: MailName
    to: MailNames
    tls: Tls = Tls.STARTTLS
    ca_file: str | None = None
    username: str = ""
    password_from: Secret | None = None
    timeout_s: sections.Period = 20.0

    def __post_init__(self) -> None:
        """Refuse an incomplete login, an invalid address, and a password without encryption."""
        if bool(self.username) != (self.password_from is not None):
            raise ValueError("set both username and password_from, or neither")
        for name, addresses in (("sender", (self.sender,)), ("to", self.to)):
            for address in addresses:
                if not _MAIL.fullmatch(address):
                    raise ValueError(
                        f"{name}: {address!r} is not an address such as ops@example.com"
                    )
        if self.username and self.tls is Tls.NONE:
            raise ValueError(
                "tls: must not be none with a password, which would be sent unencrypted"
            )


class Teams(Address, frozen=True, kw_only=True):
    """A Microsoft Teams workflow that accepts cards."""


class Alertmanager(Address, frozen=True, kw_only=True):
    """An Alertmanager, which groups and routes alerts itself; `url` is its base address."""

    bearer_from: Secret | None = None


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True):
    """The Kubernetes API; without `url`, the API of the cluster in which the notifier runs."""

    url: Url | None = None
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105  # a path
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    timeout_s: sections.Period = 5.0


class KubernetesEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Kubernetes Events about the node and, if `pods` is set, about the pods of an alert."""

    pods: bool = True
    namespace: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] = (
        "default"
    )
    """The namespace for Events about nodes; kubectl looks only in `default`."""


class Apprise(msgspec.Struct, frozen=True, kw_only=True):
    """Any service that Apprise supports; needs the extra `apprise`."""

    url_from: Secret
    timeout_s: sections.Period = 60.0


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file to which each notification adds one JSON line."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Console(msgspec.Struct, frozen=True, kw_only=True):
    """The notifier's own log."""


class Templates(msgspec.Struct, frozen=True, kw_only=True):
    """Texts that replace the built-in ones; docs/notifier.md lists the variables (`$name`).

    `alert` is filled in once for each alert; in `text`, `$alerts` stands for the results.
    """

    title: Text | None = None
    text: Text | None = None
    alert: Text | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a receiver; without `rate_per_s`, the default rate of its kind applies."""

    rate_per_s: Rate | None = None
    burst: Burst = 1
    retry_for_s: RetryFor = 86_400.0
    """How long a notification is retried before it becomes a dead letter."""


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver: its name, a section for exactly one kind, and settings that all kinds share."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$")]
    webhook: Webhook | None = None
    slack: Slack | None = None
    pagerduty: PagerDuty | None = None
    email: Email | None = None
    teams: Teams | None = None
    alertmanager: Alertmanager | None = None
    kubernetes: KubernetesEvents | None = None
    apprise: Apprise | None = None
    file: File | None = None
    console: Console | None = None
    send_resolved: bool = True
    limits: Limits = Limits()
    templates: Templates = Templates()

    @property
    def way(self) -> str:
        """The kind of receiver."""
        return next(way for way in WAYS if getattr(self, way) is not None)

    def __post_init__(self) -> None:
        """Refuse a receiver that has no kind, or more than one."""
        set_ways = [way for way in WAYS if getattr(self, way) is not None]
        if len(set_ways) != 1:
            ways = ", ".join(WAYS)
            names = " and ".join(set_ways) or "none"
            raise ValueError(f"receiver {self.name}: set exactly one of {ways}; set now: {names}")

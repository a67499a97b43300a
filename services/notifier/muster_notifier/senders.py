"""Door to every way of reaching somebody: a receiver's settings become what sends to it."""

from dataclasses import dataclass
from typing import Final

from muster_notifier import (
    addresses,
    config,
    console,
    files,
    posting,
    receivers,
    signature,
    webhook,
)

_MANY: Final = 1_000.0


class Unusable(Exception):
    """A receiver's settings cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Sender:
    """What sends, and how often it may by default."""

    send: receivers.Send
    rate_per_s: float


def make(receiver: addresses.Receiver, settings: config.Settings) -> Sender:
    """Return what sends to a receiver. Raises Unusable."""
    try:
        return _make(receiver, _templates(receiver, settings))
    except (files.NoSecret, ValueError) as error:
        raise Unusable(f"receiver {receiver.name}: {error}") from None


def _templates(receiver: addresses.Receiver, settings: config.Settings) -> addresses.Templates:
    """Return a receiver's templates; what it does not have, all have."""
    own, shared = receiver.templates, settings.templates
    return addresses.Templates(
        title=own.title or shared.title,
        text=own.text or shared.text,
        alert=own.alert or shared.alert,
    )


def _make(receiver: addresses.Receiver, templates: addresses.Templates) -> Sender:
    match receiver:
        case addresses.Receiver(webhook=addresses.Webhook() as found):
            hook = webhook.Webhook(
                site(found),
                layout=found.format,
                alerts_max=found.max_alerts,
                keys=[signature.key_of(files.secret(one)) for one in found.secrets],
                bearer=files.secret(found.bearer_from) if found.bearer_from else "",
                templates=templates,
            )
            return Sender(hook.send, _MANY)
        case addresses.Receiver(file=addresses.File(path=path)):
            return Sender(files.File(path, templates).send, _MANY)
        case _:
            return Sender(console.Console(templates).send, _MANY)


def site(found: addresses.Address) -> posting.Site:
    """Return where an address leads. Raises NoSecret and ValueError."""
    url = found.url
    if url is None:
        assert found.url_from is not None, "an address has one of the two"
        url = files.secret(found.url_from)
    return posting.Site(url, timeout_s=found.timeout_s, reach=found.reach)

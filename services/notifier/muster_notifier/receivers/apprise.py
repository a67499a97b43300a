"""Adapter: Apprise: many other services; messages may repeat, and back-off is imprecise.

Apprise reports whether it worked and not why: every failure counts as temporary. It blocks and
sleeps, so it runs in a thread of its own.
"""

import asyncio
import functools
import importlib
from collections.abc import Mapping
from typing import Any

from muster import blocking
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import message, results
from muster_notifier.routing import notifications


class Apprise:
    """Sends to one Apprise URL."""

    def __init__(
        self, url: str, *, timeout_s: float, templates: receiver_settings.Templates
    ) -> None:
        """Raise ValueError if Apprise is not installed or does not support the URL."""
        try:
            apprise: Any = importlib.import_module("apprise")
        except ImportError:
            raise ValueError(
                "apprise is not installed: pip install 'muster-k8s[apprise]' "
                "(or '.[apprise]' in the source tree)"
            ) from None
        self._apprise: Any = apprise.Apprise()
        if not self._apprise.add(url):
            raise ValueError("apprise: it does not know this kind of URL")
        self._blocking = blocking.Serial()
        self._timeout_s = timeout_s
        self._templates = templates

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Send one message."""
        text = message.compose(notification, self._templates)
        kind = "failure" if notification.firing_ids else "success"
        try:
            async with asyncio.timeout(self._timeout_s):
                is_taken = await self._blocking.run(
                    functools.partial(
                        self._apprise.notify, body=text.text, title=text.title, notify_type=kind
                    )
                )
        except TimeoutError:
            detail = f"apprise: no answer within {self._timeout_s:g} s"
            return results.Result(results.Outcome.TIMED_OUT, detail, is_unknown=True)
        if is_taken:
            return results.Result(results.Outcome.TAKEN, "apprise: sent")
        return results.Result(results.Outcome.FAILED, "apprise: not sent", is_unknown=True)

"""Adapter: an Alertmanager: pushes alerts to its API, for people who already run one.

It forgets an alert that is not pushed again; each says itself for how long it is believed, which is
longer than until we remind of it.
"""

from collections.abc import Mapping
from datetime import timedelta

from muster_notifier import answers, posting, pushes
from muster_notifier import notification as notifications


class Push:
    """One Alertmanager, by its base address."""

    def __init__(self, site: posting.Site, *, bearer: str, believed_for: timedelta) -> None:
        self._site = site
        self._headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._believed_for = believed_for

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> answers.Answer:
        """Push the alerts of a group."""
        body = pushes.alerts(notification, believed_for=self._believed_for)
        return await posting.post_json(
            self._site, body, below="/api/v2/alerts", headers=self._headers
        )

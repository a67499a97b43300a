"""Adapter: PagerDuty: Events API v2."""

from collections.abc import Mapping

from muster_notifier import addresses, answers, incidents, message, posting
from muster_notifier import notification as notifications


class Service:
    """One integration of one service."""

    def __init__(
        self, site: posting.Site, *, routing_key: str, templates: addresses.Templates
    ) -> None:
        self._site = site
        self._routing_key = routing_key
        self._templates = templates

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> answers.Answer:
        """Trigger, acknowledge or resolve the group's incident."""
        words = message.compose(notification, self._templates)
        body = incidents.event(notification, words, routing_key=self._routing_key)
        return await posting.post_json(self._site, body)

"""Adapter: Microsoft Teams: a workflow that takes cards."""

from collections.abc import Mapping

from muster_notifier import addresses, answers, cards, message, posting
from muster_notifier import notification as notifications


class Workflow:
    """One workflow's URL."""

    def __init__(self, site: posting.Site, templates: addresses.Templates) -> None:
        self._site = site
        self._templates = templates

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> answers.Answer:
        """Post a card."""
        words = message.compose(notification, self._templates)
        return await posting.post_json(self._site, cards.card(notification, words))

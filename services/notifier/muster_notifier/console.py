"""Adapter: stdout: a receiver that is the notifier's own log, one line a notification."""

from collections.abc import Mapping

from muster.service import logs
from muster_notifier import addresses, answers, message
from muster_notifier import notification as notifications


class Console:
    """The log."""

    def __init__(self, templates: addresses.Templates) -> None:
        self._templates = templates

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> answers.Answer:
        """Log the message."""
        words = message.compose(notification, self._templates)
        logs.logger().info("notification", id=words.key, text=words.text)
        return answers.Answer(outcome=answers.Outcome.TAKEN, detail="logged")

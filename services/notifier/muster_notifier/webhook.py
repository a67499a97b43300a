"""Adapter: webhooks: one POST for each notification, signed if there are secrets."""

import time
from collections.abc import Mapping, Sequence

from muster_notifier import addresses, answers, bodies, message, posting, signature
from muster_notifier import notification as notifications


class Webhook:
    """One URL that notifications are posted to."""

    def __init__(
        self,
        site: posting.Site,
        *,
        layout: addresses.Format = addresses.Format.CLOUDEVENTS,
        alerts_max: int = 0,
        keys: Sequence[bytes] = (),
        bearer: str = "",
        templates: addresses.Templates | None = None,
    ) -> None:
        self._site = site
        self._layout = layout
        self._alerts_max = alerts_max
        self._keys = tuple(keys)
        self._bearer = bearer
        self._templates = templates or addresses.Templates()

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> answers.Answer:
        """Post one message and return what became of it.

        A timeout leaves unknown whether it arrived: it is tried again under the same
        `Idempotency-Key` and `webhook-id`, by which a receiver can drop the repeat.
        """
        words = message.compose(notification, self._templates)
        body = bodies.body(notification, words, layout=self._layout, alerts_max=self._alerts_max)
        headers = {
            "Content-Type": bodies.CONTENT_TYPES[self._layout],
            "Idempotency-Key": notification.id,
        }
        if self._keys:
            at_s = int(time.time())
            headers |= signature.headers(self._keys, key=notification.id, at_s=at_s, body=body)
        if self._bearer:
            headers["Authorization"] = f"Bearer {self._bearer}"
        answer = await self._site.ask("POST", headers=headers, body=body, read=posting.Read.NOTHING)
        if isinstance(answer, posting.Response):
            return answers.of_status(answer.status, answer.headers)
        return answer

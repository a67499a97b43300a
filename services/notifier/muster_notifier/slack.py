"""Adapter: Slack: one root message for each group, edited in place, and a thread with its story.

With an incoming webhook instead of a bot's token every change is a message of its own.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from muster_notifier import addresses, answers, blocks, message, posting
from muster_notifier import notification as notifications

_OK: Final = 200


class Channel:
    """One channel, by a bot's token."""

    def __init__(
        self,
        site: posting.Site,
        *,
        token: str,
        channel: str,
        templates: addresses.Templates,
        pace_s: float,
    ) -> None:
        """Take the API's address, such as https://slack.com/api; wait `pace_s` between requests."""
        self._site = site
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json; charset=utf-8",
        }
        self._channel = channel
        self._templates = templates
        self._pace_s = pace_s

    async def send(
        self, notification: notifications.Notification, known: Mapping[str, str]
    ) -> answers.Answer:
        """Post the group's message, or edit it and say in its thread what changed."""
        words = message.compose(notification, self._templates)
        content = blocks.content(notification, words)
        if "ts" not in known:
            return await self._begin(content)
        where = {"channel": known.get("channel", self._channel), "ts": known["ts"]}
        reply = await self._call("chat.update", {**where, **content})
        if isinstance(reply, answers.Answer):
            return reply
        if blocks.is_gone(reply):
            await asyncio.sleep(self._pace_s)
            return replace(await self._begin(content), requests=2)
        if not reply.ok:
            return blocks.meaning(reply)
        await asyncio.sleep(self._pace_s)
        told = await self._call(
            "chat.postMessage",
            {
                "channel": where["channel"],
                "thread_ts": where["ts"],
                "text": blocks.change(notification, words),
            },
        )
        answer = told if isinstance(told, answers.Answer) else blocks.meaning(told)
        return replace(answer, data=where, requests=2)

    async def _begin(self, content: blocks.Json) -> answers.Answer:
        reply = await self._call("chat.postMessage", {"channel": self._channel, **content})
        if isinstance(reply, answers.Answer):
            return reply
        data = {"channel": reply.channel or self._channel, "ts": reply.ts} if reply.ts else {}
        return replace(blocks.meaning(reply), data=data)

    async def _call(self, method: str, body: blocks.Json) -> blocks.Reply | answers.Answer:
        answer = await self._site.ask(
            "POST", below=f"/{method}", headers=self._headers, body=msgspec.json.encode(body)
        )
        if isinstance(answer, answers.Answer):
            return answer
        if answer.status != _OK:
            return answers.of_status(answer.status, answer.headers)
        return blocks.read(answer.body)


class Incoming:
    """One channel, by an incoming webhook; it cannot edit."""

    def __init__(self, site: posting.Site, templates: addresses.Templates) -> None:
        self._site = site
        self._templates = templates

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> answers.Answer:
        """Post a message."""
        words = message.compose(notification, self._templates)
        body = msgspec.json.encode(blocks.content(notification, words))
        return await posting.post_json(self._site, body)

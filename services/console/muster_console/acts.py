"""Adapter for NATS: performs what people do in the console, and publishes audit events about it.

The acts have the same effect as `muster silence` and `muster dlq`. Each act has a time limit; it is
logged and published, whatever its outcome. Acts above a person's rate limit are refused, and only
logged.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from muster import matching, pacing, vocabulary
from muster.fleet import dead_letters, writing
from muster.nats import bus, jetstream
from muster.service import logs
from muster_console import identities

_LIMIT_S: Final = 10.0
_PER_S: Final = 0.5
_BURST: Final = 20
_PEOPLE_MAX: Final = 1_000
_AT_ONCE_MAX: Final = 8
_ABOUT_MAX: Final = 1_000
_DONE: Final = vocabulary.ActOutcome.DONE
_REFUSED: Final = vocabulary.ActOutcome.REFUSED
_FAILED: Final = vocabulary.ActOutcome.FAILED
_UNCONFIRMED: Final = (
    f"NATS did not confirm this change within {_LIMIT_S:g} s; it may or may not have taken effect; "
    "check that the console has the permissions of the role console, and that NATS has free space"
)
_ENDED: Final = (
    "the console ended before NATS confirmed this change; it may or may not have taken effect"
)


class Failed(Exception):
    """An act failed, or may have failed; the message gives the reason."""


class Refused(Failed):
    """The act was refused, and nothing was changed."""


class TooOften(Refused):
    """The act was refused because the person exceeded the rate limit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A requested act, with those fields of its audit event that are known before it is done."""

    who: identities.Identity
    act: vocabulary.Act
    target: str
    about: str = ""
    reason: str = ""


class _Result(NamedTuple):
    """The outcome of an act; `note` explains why it was refused, failed or had no effect."""

    outcome: vocabulary.ActOutcome
    note: str = ""
    about: str = ""
    """The object of the act, if it had to be read from NATS; else empty."""


class Acts:
    """Performs acts, a few at a time. Cancelling an act records that it may have taken effect."""

    def __init__(self, connected: bus.Bus) -> None:
        self._bus = connected
        self._places = asyncio.Semaphore(_AT_ONCE_MAX)
        self._rates: pacing.KeyedBuckets[identities.Identity] = pacing.KeyedBuckets(
            per_s=_PER_S, burst=_BURST, keys_max=_PEOPLE_MAX
        )

    async def silence(self, who: identities.Identity, silence: matching.Silence) -> None:
        """Add a silence; adding the same silence again changes nothing. Raises Failed."""
        attempt = _Attempt(
            who=who,
            act=vocabulary.Act.SILENCE,
            target=silence.id,
            about=f"{' '.join(silence.matchers)} until {silence.ends_at:%Y-%m-%dT%H:%M:%SZ}",
            reason=silence.comment,
        )

        async def work() -> _Result:
            try:
                await writing.add_silence(self._bus.link, silence)
            except writing.SilenceExists as error:
                if silence.is_sent_again(error.stored):
                    return _Result(_DONE, "sent again: this silence was already stored")
                return _Result(
                    _REFUSED, "this form was already sent with other content; send it again"
                )
            return _Result(_DONE)

        await self._perform(attempt, work)

    async def expire(self, who: identities.Identity, silence_id: str) -> None:
        """End a silence. Raises Failed."""

        async def work() -> _Result:
            at = datetime.now(UTC)
            silence, _ = await writing.expire_silence(self._bus.link, silence_id, at)
            if silence is None:
                return _Result(_REFUSED, "there is no such silence")
            about = f"{' '.join(silence.matchers)} (by {silence.author}: {silence.comment})"
            if silence.ends_at < at:
                ended = f"this silence had already ended, at {silence.ends_at:%Y-%m-%dT%H:%M:%SZ}"
                return _Result(_REFUSED, ended, about)
            return _Result(_DONE, about=about)

        attempt = _Attempt(who=who, act=vocabulary.Act.EXPIRE_SILENCE, target=silence_id)
        await self._perform(attempt, work)

    async def send_again(self, who: identities.Identity, letter_id: str) -> None:
        """Put a dead letter back into the outbox. Raises Failed."""

        async def work() -> _Result:
            letters, _ = await writing.read_dead_letters(
                self._bus.link, dead_letters.NOTIFICATIONS, letter_id=letter_id
            )
            for letter in letters:
                await writing.send_again(self._bus.link, letter)
            if not letters:
                return _Result(_REFUSED, "there is no such undelivered notification")
            about = "; ".join(f"{each.receiver} {each.about}" for each in letters)
            return _Result(_DONE, about=about)

        attempt = _Attempt(who=who, act=vocabulary.Act.SEND_AGAIN, target=letter_id)
        await self._perform(attempt, work)

    async def _perform(self, attempt: _Attempt, work: Callable[[], Awaitable[_Result]]) -> None:
        """Do the work and publish its outcome; a cancelled act counts as failed. Raises Failed."""
        if not self._rates.try_take(attempt.who, asyncio.get_running_loop().time()):
            # no event: a flood of attempts must not cause a flood of events
            logs.logger().warning(
                "operator_action_refused", actor=attempt.who.name, reason="too_often"
            )
            raise TooOften("too many actions; try again in a few seconds")
        try:
            async with asyncio.timeout(_LIMIT_S), self._places:
                result = await work()
        except TimeoutError:
            result = _Result(_FAILED, _UNCONFIRMED)
        except jetstream.Refused as error:
            result = _Result(_REFUSED, f"NATS refused the change: {error}")
        except asyncio.CancelledError:
            self._record(attempt, _Result(_FAILED, _ENDED))
            raise
        self._record(attempt, result)
        if result.outcome is _REFUSED:
            raise Refused(result.note)
        if result.outcome is _FAILED:
            raise Failed(result.note)

    def _record(self, attempt: _Attempt, result: _Result) -> None:
        outcome, reason = result.outcome, result.note or attempt.reason
        about = (result.about or attempt.about)[:_ABOUT_MAX]
        logs.logger().info(
            "operator_acted",
            actor=attempt.who.name,
            identity=str(attempt.who.kind),
            act=str(attempt.act),
            outcome=str(outcome),
            target=attempt.target,
            about=about,
            reason=reason,
        )
        self._bus.enqueue(
            vocabulary.OperatorActed(
                node=vocabulary.FLEET,
                at=datetime.now(UTC),
                actor=attempt.who.name,
                identity=str(attempt.who.kind),
                act=attempt.act,
                outcome=outcome,
                target=attempt.target,
                about=about,
                reason=reason[:_ABOUT_MAX],
            )
        )

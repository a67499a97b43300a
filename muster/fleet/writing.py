"""Adapter for NATS: adds and expires silences, and sends dead letters again.

`muster silence`, `muster dlq` and the console share these functions. Each waits for NATS without a
time limit. Those that write a silence raise `jetstream.Refused`.
"""

import heapq
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from muster import matching
from muster.fleet import dead_letters
from muster.nats import connection, storage, streams

_READ_AT_ONCE: Final = 100
"""How many letters, with their bodies, are in memory at the same time."""
_KEPT: Final = timedelta(days=5)
"""How long an expired silence can still be listed, as in Alertmanager."""


class SilenceExists(Exception):
    """A silence with the same id is already stored."""

    def __init__(self, stored: matching.Silence) -> None:
        super().__init__(f"a silence with the id {stored.id} already exists")
        self.stored = stored


async def read_silences(
    link: connection.Connection,
) -> tuple[dict[str, matching.Silence], Mapping[str, str]]:
    """Return the silences by id, and why others are unreadable, also by id."""
    by_id, unreadable = {}, {}
    async for change in storage.follow(link, streams.SILENCES):
        if change is None:
            break
        key, value = change
        if value:
            try:
                by_id[key] = matching.decode_silence(value)
            except matching.MalformedSilence as error:
                unreadable[key] = str(error)
    return by_id, unreadable


async def add_silence(link: connection.Connection, silence: matching.Silence) -> Mapping[str, str]:
    """Store a silence, and delete silences that expired long ago.

    Returns why stored silences are unreadable, by id. Raises SilenceExists.
    """
    by_id, unreadable = await read_silences(link)
    if silence.id in by_id:
        raise SilenceExists(by_id[silence.id])
    await _write(link, silence)
    for key, old in by_id.items():
        if old.ends_at < silence.starts_at - _KEPT:
            await storage.put(link, streams.SILENCES, key, b"")
    return unreadable


async def expire_silence(
    link: connection.Connection, silence_id: str, at: datetime
) -> tuple[matching.Silence | None, Mapping[str, str]]:
    """End a silence; return it, or None if it does not exist.

    Also returns why other silences are unreadable, by id.
    """
    by_id, unreadable = await read_silences(link)
    silence = by_id.get(silence_id)
    if silence is not None:
        silence = silence.expired(at)
        await _write(link, silence)
    return silence, unreadable


async def read_dead_letters(
    link: connection.Connection,
    subjects: str = dead_letters.SUBJECTS,
    *,
    letter_id: str | None = None,
) -> tuple[list[dead_letters.DeadLetter], int]:
    """Return the dead letters on these subjects, and how many there are.

    With `letter_id`, only those with this id are read and counted.
    """
    names = await storage.waiting_subjects(link, streams.DEAD_LETTERS, subjects)
    wanted = [name for name in names if letter_id in {None, dead_letters.id_of(name)}]
    messages = await storage.newest_messages(link, streams.DEAD_LETTERS, wanted)
    return [dead_letters.DeadLetter(*message) for message in messages], len(wanted)


class NewestLetters:
    """Reads the newest dead letters on some subjects, repeatedly.

    NATS lists the subjects, but not when their messages were stored. So each letter is downloaded
    once to learn its position; later calls download only new letters and the newest letters.
    """

    def __init__(self, link: connection.Connection, subjects: str, *, most: int) -> None:
        self._link = link
        self._subjects = subjects
        self._most = most
        self._numbers: dict[str, int] = {}
        """The position of each letter in the stream, by subject."""

    async def read(self) -> tuple[list[dead_letters.DeadLetter], int]:
        """Return the newest letters, newest first, and the number of all letters.

        A call that was interrupted is continued by the next call.

        If a letter that is not among the newest is replaced, its rank does not change.
        """
        names = await storage.waiting_subjects(self._link, streams.DEAD_LETTERS, self._subjects)
        self._numbers = {name: self._numbers[name] for name in names if name in self._numbers}
        unknown = [name for name in names if name not in self._numbers]
        for start in range(0, len(unknown), _READ_AT_ONCE):
            await self._read(unknown[start : start + _READ_AT_ONCE])
        newest = heapq.nlargest(self._most, self._numbers, key=self._numbers.__getitem__)
        letters = await self._read(newest)
        return sorted(letters, key=lambda each: each.number, reverse=True), len(names)

    async def _read(self, names: Sequence[str]) -> list[dead_letters.DeadLetter]:
        messages = await storage.newest_messages(self._link, streams.DEAD_LETTERS, names)
        letters = [dead_letters.DeadLetter(*message) for message in messages]
        self._numbers |= {each.subject: each.number for each in letters}
        return letters


async def send_again(link: connection.Connection, letter: dead_letters.DeadLetter) -> bool:
    """Put a dead letter back into the outbox; return False if the outbox already had it."""
    message = dead_letters.again(letter)
    # into the outbox first: a crash in between causes a duplicate, but loses nothing
    is_new = await storage.enqueue(
        link, message.subject, letter.body, key=message.key, headers=message.headers
    )
    await storage.remove_waiting(link, streams.DEAD_LETTERS, letter.subject, up_to=letter.number)
    return is_new


async def _write(link: connection.Connection, silence: matching.Silence) -> None:
    await storage.put(link, streams.SILENCES, silence.id, matching.encode_silence(silence))

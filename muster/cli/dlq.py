"""Adapter: NATS for the command: dead letters are listed, shown and replayed."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from muster.cli import bus_client, tables
from muster.nats import bus, streams, work_queue

_SUBJECTS: Final = "muster.dlq.>"
_NOTIFICATION: Final = "muster.dlq.notification."
_ID_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter: a notification, or an event that nobody could believe."""

    subject: str
    body: bytes
    headers: Mapping[str, str]
    number: int

    @property
    def id(self) -> str:
        """What it is called on the command line."""
        return self.subject.rpartition(".")[2][:_ID_SHOWN]

    @property
    def receiver(self) -> str:
        """Whom it did not reach; empty for an event."""
        return self.headers.get("Muster-Receiver", "")

    @property
    def error(self) -> str:
        """Why it died."""
        return self.headers.get("Muster-Error") or self.headers.get("Muster-Reason", "")


def show_all(*, as_json: bool, url: str | None) -> int:
    """Print the dead letters."""
    return bus_client.run_within("dlq", _list(url, as_json=as_json))


def show(letter_id: str, *, url: str | None) -> int:
    """Print a dead letter whole."""
    return bus_client.run_within("dlq", _each(letter_id, url, _print))


def replay(letter_id: str, *, url: str | None) -> int:
    """Put dead letters back into the outbox: one, those of a receiver, or `all`."""
    return bus_client.run_within("dlq", _replay(letter_id, url))


async def _all(connected: bus.Bus) -> list[Letter]:
    found = await work_queue.waiting(connected.link, streams.DEAD_LETTERS, _SUBJECTS)
    return [Letter(*one) for one in found]


async def _list(url: str | None, *, as_json: bool) -> int:
    async with bus_client.connect("dlq", url) as connected:
        letters = await _all(connected)
    if as_json:
        for letter in letters:
            print(json.dumps({"id": letter.id, "subject": letter.subject, **letter.headers}))
        return 0
    rows = [
        (
            letter.id,
            letter.receiver or "(event)",
            letter.headers.get("Muster-Group") or letter.headers.get("Muster-Subject", ""),
            letter.headers.get("Muster-Died-At", "")[:19],
            letter.headers.get("Muster-Attempts", ""),
            letter.error,
        )
        for letter in letters
    ]
    names = ("id", "receiver", "group", "died", "tries", "why")
    tables.show(names, rows, nothing="no dead letters")
    return 0


async def _each(letter_id: str, url: str | None, act: Callable[[Letter], None]) -> int:
    async with bus_client.connect("dlq", url) as connected:
        letters = [letter for letter in await _all(connected) if letter.id == letter_id]
    for letter in letters:
        act(letter)
    return 0 if letters else _mistake(f"no dead letter is called {letter_id}")


def _print(letter: Letter) -> None:
    for name, value in letter.headers.items():
        print(f"{name}: {value}")
    print(letter.body.decode("utf-8", "replace"))


async def _replay(letter_id: str, url: str | None) -> int:
    # into the outbox first: a crash in between repeats it, and loses nothing
    async with bus_client.connect("dlq", url) as connected:
        letters = [
            letter
            for letter in await _all(connected)
            if letter.subject.startswith(_NOTIFICATION)
            and letter_id in {letter.id, letter.receiver, "all"}
        ]
        for letter in letters:
            # who asks for the same at the same time asks for one
            name = hashlib.sha256(f"{letter.subject} {letter.number}".encode()).hexdigest()[:32]
            is_new = await work_queue.put(
                connected.link,
                f"muster.outbox.{letter.receiver}.replay-{name}",
                letter.body,
                key=f"replay {name}",
                headers={"Muster-Replay": "1"},
            )
            await work_queue.remove(
                connected.link, streams.DEAD_LETTERS, letter.subject, up_to=letter.number
            )
            where = f"back in the outbox of {letter.receiver}"
            print(f"{letter.id}: {where if is_new else f'{where} already'}")
    return 0 if letters else _mistake(f"no dead notification is called {letter_id}")


def _mistake(problem: str) -> int:
    print(f"muster dlq: {problem}", file=sys.stderr)
    return 2

"""Adapter: NATS: `muster dlq` lists, shows and replays dead letters."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import cyclopts
from cyclopts import Parameter

from muster import escaping
from muster.cli import events, output
from muster.nats import bus, storage, streams

dead_letters_app = cyclopts.App(
    name="dlq", help="List and show dead letters, and replay undelivered notifications."
)

_SUBJECTS: Final = "muster.dlq.>"
_NOTIFICATION: Final = "muster.dlq.notification."
_ID_SHOWN: Final = 12
_Id = Annotated[str, Parameter(name="LETTER-ID")]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A notification that could not be delivered, or an event that could not be processed."""

    subject: str
    body: bytes
    headers: Mapping[str, str]
    number: int

    @property
    def id(self) -> str:
        """The dead letter's id on the command line."""
        return self.subject.rpartition(".")[2][:_ID_SHOWN]

    @property
    def receiver(self) -> str:
        """The receiver of the notification; empty for an event."""
        return self.headers.get("Muster-Receiver", "")

    @property
    def error(self) -> str:
        """Why delivery or processing was abandoned."""
        return self.headers.get("Muster-Error") or self.headers.get("Muster-Reason", "")

    def summary(self) -> dict[str, str]:
        """Return the dead letter for programs, without its body."""
        return {"id": self.id, "subject": self.subject, **self.headers}


@dead_letters_app.command(name="list")
def list_dead_letters(*, json: output.Json = False, url: events.Url = None) -> int:
    """Print the dead letters."""
    return events.run_within("dlq", _list_dead_letters(url, as_json=json))


@dead_letters_app.command
def show(
    letter_id: _Id,
    /,
    *,
    json: output.Json = False,
    raw: output.Flag = False,
    url: events.Url = None,
) -> int:
    """Print one dead letter in full.

    Parameters
    ----------
    letter_id
        The dead letter's id.
    raw
        Print the unchanged bytes of the body, to a file or a pipe.

    """
    return events.run_within("dlq", _show(letter_id, url, as_json=json, as_raw=raw))


@dead_letters_app.command
def replay(letter_id: _Id, /, *, url: events.Url = None) -> int:
    """Put dead letters back into the outbox.

    Parameters
    ----------
    letter_id
        A dead letter's id, a receiver's name for all of its dead letters, or `all`.

    """
    return events.run_within("dlq", _replay(letter_id, url))


async def _read_dead_letters(connected: bus.Bus) -> list[DeadLetter]:
    waiting = await storage.waiting_messages(connected.link, streams.DEAD_LETTERS, _SUBJECTS)
    return [DeadLetter(*message) for message in waiting]


async def _list_dead_letters(url: str | None, *, as_json: bool) -> int:
    async with events.connect("dlq", url) as connected:
        letters = await _read_dead_letters(connected)
    if as_json:
        for letter in letters:
            output.print_json(letter.summary())
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
    names = ("id", "receiver", "group", "given up", "attempts", "error")
    output.table(names, rows, nothing="no dead letters")
    return 0


async def _show(letter_id: str, url: str | None, *, as_json: bool, as_raw: bool) -> int:
    async with events.connect("dlq", url) as connected:
        letters = [
            letter for letter in await _read_dead_letters(connected) if letter.id == letter_id
        ]
    for letter in letters:
        if as_raw:
            if not output.print_raw(letter.body):
                return output.fail("dlq", "--raw: standard output is a terminal; redirect it")
        elif as_json:
            output.print_json({**letter.summary(), "body": letter.body.decode("utf-8", "replace")})
        else:
            output.show(*(f"{name}: {value}" for name, value in letter.headers.items()))
            output.show(*escaping.json_text(letter.body).splitlines())
    return 0 if letters else output.fail("dlq", f"there is no dead letter {letter_id}")


async def _replay(letter_id: str, url: str | None) -> int:
    # into the outbox first: a crash in between causes a duplicate, but loses nothing
    async with events.connect("dlq", url) as connected:
        letters = [
            letter
            for letter in await _read_dead_letters(connected)
            if letter.subject.startswith(_NOTIFICATION)
            and letter_id in {letter.id, letter.receiver, "all"}
        ]
        for letter in letters:
            # two commands that replay the same letter at the same time store it only once
            name = hashlib.sha256(f"{letter.subject} {letter.number}".encode()).hexdigest()[:32]
            is_new = await storage.enqueue(
                connected.link,
                f"muster.outbox.{letter.receiver}.replay-{name}",
                letter.body,
                key=f"replay {name}",
                headers={"Muster-Replay": "1"},
            )
            await storage.remove_waiting(
                connected.link, streams.DEAD_LETTERS, letter.subject, up_to=letter.number
            )
            where = f"back in the outbox of {letter.receiver}"
            output.show(f"{letter.id}: {where if is_new else f'{where} already'}")
    if not letters and letter_id == "all":
        return output.fail("dlq", "there are no undelivered notifications")
    if not letters:
        return output.fail("dlq", f"there is no undelivered notification {letter_id}")
    return 0

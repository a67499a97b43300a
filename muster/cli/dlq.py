"""Adapter for NATS: `muster dlq` lists, shows and replays dead letters."""

from typing import Annotated

import cyclopts
from cyclopts import Parameter

from muster import escaping
from muster.cli import events, output
from muster.fleet import dead_letters, writing

dead_letters_app = cyclopts.App(
    name="dlq", help="List and show dead letters, and replay undelivered notifications."
)

_Id = Annotated[str, Parameter(name="LETTER-ID")]


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
    """Send dead letters again: put them back into the outbox.

    Parameters
    ----------
    letter_id
        A dead letter's id, a receiver's name for all of its dead letters, or `all`.

    """
    return events.run_within("dlq", _replay(letter_id, url))


async def _list_dead_letters(url: str | None, *, as_json: bool) -> int:
    async with events.connect("dlq", url) as connected:
        letters, _ = await writing.read_dead_letters(connected.link)
    if as_json:
        for letter in letters:
            output.print_json(letter.summary())
        return 0
    rows = [
        (
            letter.id,
            letter.receiver or "(event)",
            letter.about,
            letter.headers.get("Muster-Died-At", "")[:19],
            letter.attempts,
            letter.error,
        )
        for letter in letters
    ]
    names = ("id", "receiver", "group", "given up", "attempts", "error")
    output.table(names, rows, nothing="no dead letters")
    return 0


async def _show(letter_id: str, url: str | None, *, as_json: bool, as_raw: bool) -> int:
    async with events.connect("dlq", url) as connected:
        every, _ = await writing.read_dead_letters(connected.link)
    letters = [letter for letter in every if letter.id == letter_id]
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
    async with events.connect("dlq", url) as connected:
        every, _ = await writing.read_dead_letters(connected.link, dead_letters.NOTIFICATIONS)
        letters = [each for each in every if letter_id in {each.id, each.receiver, "all"}]
        for letter in letters:
            is_new = await writing.send_again(connected.link, letter)
            where = f"back in the outbox of {letter.receiver}"
            output.show(f"{letter.id}: {where if is_new else f'{where} already'}")
    if not letters and letter_id == "all":
        return output.fail("dlq", "there are no undelivered notifications")
    if not letters:
        return output.fail("dlq", f"there is no undelivered notification {letter_id}")
    return 0

"""Adapter for HTTP: the pages and forms with which people act: silence, expire, send again.

`authorization` decides who may act, and `acts` performs the acts.
"""

import asyncio
import contextlib
import hmac
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

from starlette import requests, responses, routing
from starlette.exceptions import HTTPException

from muster import matching, pacing
from muster.cli import texts
from muster.fleet import health_state
from muster.service import logs
from muster_console import (
    acts,
    alert_groups,
    authorization,
    identities,
    live,
    oidc,
    pages,
    sessions,
)

POSTS: Final = ("/silence", "/expire", "/send-again", "/sign-out")
_SEEN_S: Final = 3.0
"""The maximum time that a response waits until the console has read the effect of an act."""
_ID_MAX: Final = 64
_MATCHED_SHOWN: Final = 10
"""The maximum number of matching alerts that the form for a new silence lists."""
_SILENCE_ID: Final = 12
"""The number of characters in the id of a new silence."""
_SECRET_BYTES: Final = 32
_SIGN_INS: Final = 30
_SIGN_INS_PER_S: Final = 1.0
"""The rate limit of sign-ins per client; behind a proxy, all people count as one client."""
_CLIENTS_MAX: Final = 1_000


class Forms:
    """The HTTP routes by which people act and sign in."""

    def __init__(
        self,
        shown: pages.Pages,
        current: live.Live,
        performed: acts.Acts,
        people: authorization.Visitors,
    ) -> None:
        self._pages = shown
        self._live = current
        self._acts = performed
        self._visitors = people
        rule = people.settings.oidc
        self._provider = None if rule is None else oidc.Provider(rule, people.settings.url)
        self._attempts: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=_SIGN_INS_PER_S, burst=_SIGN_INS, keys_max=_CLIENTS_MAX
        )

    def routes(self) -> list[routing.Route]:
        """Return the routes."""
        return [
            routing.Route("/silence", self.silence_form, methods=["GET"]),
            routing.Route("/silence", self.silence, methods=["POST"]),
            routing.Route("/expire", self.expire, methods=["POST"]),
            routing.Route("/send-again", self.send_again, methods=["POST"]),
            routing.Route("/sign-in", self.sign_in, methods=["GET"]),
            routing.Route("/signed-in", self.signed_in, methods=["GET"]),
            routing.Route("/sign-out", self.sign_out, methods=["POST"]),
        ]

    async def silence_form(self, request: requests.Request) -> responses.Response:
        """Answer with the form for a new silence; the matchers are the parameters `m`."""
        matchers = "\n".join(request.query_params.getlist("m"))
        return self._silence_form(request, _Entered(id=_new_id(), matchers=matchers))

    async def silence(self, request: requests.Request) -> responses.Response:
        """Add a silence, or answer with the form again: to be checked, corrected or confirmed."""
        try:
            who, fields = await self._visitors.form(request)
        except authorization.Lapsed as error:
            entered = _entered(error.fields)
            return self._silence_form(request, entered, problem=error.detail, status=403)
        entered = _entered(fields)
        if "show" in fields:
            return self._silence_form(request, entered, problem=_unclear(entered.matchers))
        try:
            silence = matching.new_silence(
                entered.id,
                [line.strip() for line in entered.matchers.splitlines() if line.strip()],
                starts_at=datetime.now(UTC),
                lasts=texts.duration(entered.duration.strip()),
                author=who.name,
                comment=entered.comment,
            )
        except ValueError as error:
            return self._silence_form(request, entered, problem=str(error))
        fleet = self._live.fleet
        reason = alert_groups.why_confirm(silence, fleet.nodes, fleet.alerts)
        if reason and not entered.is_confirmed:
            return self._silence_form(request, entered, problem=reason, to_confirm=True)
        try:
            await self._acts.silence(who, silence)
        except acts.Failed as error:
            if isinstance(error, acts.Refused):
                # sending the form again is another act
                entered = entered._replace(id=_new_id())
            return self._silence_form(
                request, entered, problem=str(error), to_confirm=bool(reason), status=_status(error)
            )
        await self._until(lambda: silence.id in self._live.fleet.silences)
        return _back(f"alerts?done=silenced&silence={silence.id}")

    async def expire(self, request: requests.Request) -> responses.Response:
        """End a silence."""
        who, fields = await self._visitors.form(request)
        silence_id = fields.get("id", "")[:_ID_MAX]
        try:
            await self._acts.expire(who, silence_id)
        except acts.Failed as error:
            raise _failed(error) from None

        def is_over() -> bool:
            silence = self._live.fleet.silences.get(silence_id)
            return silence is None or silence.ends_at <= datetime.now(UTC)

        await self._until(is_over)
        return _back(f"alerts?done=expired&silence={silence_id}")

    async def send_again(self, request: requests.Request) -> responses.Response:
        """Put an undelivered notification back into the outbox."""
        who, fields = await self._visitors.form(request)
        letter_id = fields.get("id", "")[:_ID_MAX]
        try:
            await self._acts.send_again(who, letter_id)
        except acts.Failed as error:
            raise _failed(error) from None
        self._live.read_dead_letters_again()
        history = self._live.history
        await self._until(lambda: all(e.id != letter_id for e in history.dead_letters.letters))
        return _back("alerts?done=sent")

    async def sign_in(self, request: requests.Request) -> responses.Response:
        """Redirect a person to the OpenID Connect issuer to sign in."""
        provider, at = self._attempted_provider(request), time.time()
        attempt = sessions.SignIn(
            state=secrets.token_urlsafe(_SECRET_BYTES),
            nonce=secrets.token_urlsafe(_SECRET_BYTES),
            verifier=secrets.token_urlsafe(_SECRET_BYTES),
            ends_at=at + sessions.SIGN_IN_S,
        )
        try:
            place = await provider.address(attempt)
        except oidc.Unanswered as error:
            raise _not_signed_in(str(error), 502) from None
        answer = responses.Response(status_code=302, headers={"location": place})
        answer.raw_headers.append(self._visitors.sign_in_cookie(attempt, request.headers))
        return answer

    async def signed_in(self, request: requests.Request) -> responses.Response:
        """Complete the sign-in of a person whom the issuer sent back."""
        provider, at = self._attempted_provider(request), time.time()
        attempt = self._visitors.attempt(request, at=at)
        query = request.query_params
        state, code = query.get("state", ""), query.get("code", "")
        if attempt is None or not hmac.compare_digest(state.encode(), attempt.state.encode()):
            raise _not_signed_in(
                "this sign-in was begun elsewhere, or too long ago; try again", 403
            )
        if not code:
            raise _not_signed_in(query.get("error", "the issuer sent no code")[:200], 403)
        try:
            identity = await provider.identity(code, attempt, at=at)
        except oidc.Unanswered as error:
            raise _not_signed_in(str(error), 502) from None
        except identities.Unknown as error:
            raise _not_signed_in(str(error), 403) from None
        logs.logger().info("signed_in", actor=identity.name)
        answer = _back("alerts")
        # a new session: an earlier one may be known to somebody else
        session = self._visitors.session(identity.name)
        answer.raw_headers.append(self._visitors.cookie(session, request.headers))
        answer.raw_headers.append(self._visitors.sign_in_cookie(None, request.headers))
        return answer

    async def sign_out(self, request: requests.Request) -> responses.Response:
        """Sign a person out: give the browser a new session in which nobody has signed in."""
        await self._visitors.form(request)
        visitor = authorization.visitor_of(request)
        assert visitor is not None, "only a visitor sends a form"
        self._visitors.sign_out(visitor.session)
        answer = _back("alerts")
        session = self._visitors.session()
        answer.raw_headers.append(self._visitors.cookie(session, request.headers))
        return answer

    def _attempted_provider(self, request: requests.Request) -> oidc.Provider:
        """Return the issuer. Raises HTTPException if none is set, or after too many attempts."""
        if self._provider is None:
            raise HTTPException(404, "Nobody can sign in here: writing.oidc is not configured.")
        client = request.client.host if request.client else ""
        if not self._attempts.try_take(client, asyncio.get_running_loop().time()):
            raise HTTPException(429, "Too many people are signing in; try again in a minute.")
        return self._provider

    async def _until(self, is_seen: Callable[[], bool]) -> None:
        """Wait up to `_SEEN_S` until the console has read the change; pages may show it later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEEN_S):
                while not is_seen():
                    await self._live.ticked()

    def _silence_form(
        self,
        request: requests.Request,
        entered: "_Entered",
        *,
        problem: str = "",
        to_confirm: bool = False,
        status: int = 400,
    ) -> responses.Response:
        return self._pages.page(
            request,
            "silence.html",
            status=status if problem else 200,
            entered=entered,
            problem=problem,
            to_confirm=to_confirm,
            muted=self._muted(request, entered.matchers),
            limit=_MATCHED_SHOWN,
        )

    def _muted(self, request: requests.Request, matchers: str) -> list[health_state.Alert] | None:
        """Return the firing alerts that match.

        None if there are no matchers, too many or invalid ones, or if the visitor may not act.
        """
        visitor = authorization.visitor_of(request)
        if visitor is None or visitor.identity is None:
            return None
        try:
            parsed = matching.parse_all(filter(str.strip, matchers.splitlines()))
        except ValueError:
            return None
        is_bounded = 0 < len(parsed) <= matching.MATCHERS_MAX
        return alert_groups.muted(parsed, self._live.fleet.alerts) if is_bounded else None


class _Entered(NamedTuple):
    """The fields that a person has entered in the form of a new silence.

    The form contains the id of the silence, so that sending the form twice adds only one silence.
    """

    id: str
    matchers: str
    duration: str = "2h"
    comment: str = ""
    confirmed: str = ""

    @property
    def to_confirm(self) -> str:
        """The duration and matchers to confirm; if they change, the person must confirm again."""
        return " ".join((*self.duration.split(), *self.matchers.split()))

    @property
    def is_confirmed(self) -> bool:
        """Whether the person has confirmed this silence."""
        return self.confirmed == self.to_confirm


def _new_id() -> str:
    return uuid.uuid4().hex[:_SILENCE_ID]


def _entered(fields: Mapping[str, str]) -> _Entered:
    """Return the fields of a form. Raises HTTPException."""
    silence_id = fields.get("id", "")
    if len(silence_id) != _SILENCE_ID or not silence_id.isalnum():
        raise HTTPException(400, "Nothing was done: the form is not complete; reload it.")
    return _Entered(
        id=silence_id,
        # browsers end lines with CR LF
        matchers="\n".join(fields.get("matchers", "").splitlines()),
        duration=fields.get("duration", ""),
        comment=fields.get("comment", "").strip(),
        confirmed=fields.get("confirmed", ""),
    )


def _unclear(matchers: str) -> str:
    """Return why these matchers are invalid or can match no alert; empty if they can match."""
    try:
        parsed = matching.parse_all(filter(str.strip, matchers.splitlines()))
    except ValueError as error:
        return str(error)
    return "; ".join(filter(None, map(matching.doubt, parsed)))


def _back(place: str) -> responses.Response:
    # relative, because a proxy may serve the console below a path
    return responses.Response(status_code=303, headers={"location": place})


def _failed(error: acts.Failed) -> HTTPException:
    begin = "Nothing was done: " if isinstance(error, acts.Refused) else ""
    return HTTPException(_status(error), f"{begin}{error}")


def _status(error: acts.Failed) -> int:
    match error:
        case acts.TooOften():
            return 429
        case acts.Refused():
            return 409
        case _:
            return 503


def _not_signed_in(reason: str, status: int) -> HTTPException:
    logs.logger().warning("sign_in_failed", reason=reason)
    return HTTPException(status, f"You are not signed in: {reason}.")

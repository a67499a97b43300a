"""Adapter for HTTP: identifies who requests a page, decides who may act, and reads forms."""

import asyncio
import os
import re
import secrets
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from starlette import datastructures, requests, types
from starlette.exceptions import HTTPException

from muster.service import logs
from muster_console import config, identities, sessions

_KEY_BYTES: Final = 32
_ID_BYTES: Final = 16
_FORM_BYTES_MAX: Final = 16 * 1024
_FORM_FIELDS_MAX: Final = 32
_FORM_WAIT_S: Final = 10.0
_TABLE_BYTES_MAX: Final = 16 * 1024 * 1024
_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_PORT: Final = re.compile("[0-9]{1,5}")
_SCOPE: Final = "muster.visitor"
_WITHOUT: Final = ("/static/", "/api/", "/healthz", "/readyz", "/metrics")


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """Who requests a page; if the visitor may not act, `identity` is None and `why` the reason."""

    session: sessions.Session
    identity: identities.Identity | None
    why: str
    token: str
    can_sign_in: bool


class Lapsed(HTTPException):
    """A form was sent without a valid session or token; the person may send the fields again."""

    def __init__(self, reason: str, fields: dict[str, str]) -> None:
        super().__init__(403, reason)
        self.fields = fields


class Visitors:
    """Identifies who requests a page, and decides whether this person may act."""

    def __init__(self, settings: config.Writing, *, user: str) -> None:
        self.settings = settings
        self._user = user
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._signed_out = sessions.SignedOut()
        split = urllib.parse.urlsplit(settings.url)
        self._origin = config.origin(settings.url) if settings.url else ""
        self.hosts = [split.hostname] if split.hostname else []
        """The host name in the console's address, as a list; empty if no address is configured."""
        self.is_secure = split.scheme == "https"

    def around(self, inner: types.ASGIApp) -> types.ASGIApp:
        """Return an application that adds the visitor to each request for a page."""

        async def application(scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
            if scope["type"] != "http" or scope["path"].startswith(_WITHOUT):
                await inner(scope, receive, send)
            else:
                await self._answer(inner, scope, receive, send)

        return application

    async def _answer(
        self, inner: types.ASGIApp, scope: types.Scope, receive: types.Receive, send: types.Send
    ) -> None:
        headers = datastructures.Headers(scope=scope)
        given = _cookies(headers).get(self._cookie_name(headers), "")
        at = time.time()
        unsealed = sessions.unseal(given, sessions.Session, self._key, at=at)
        valid_session = None if unsealed is None or unsealed in self._signed_out else unsealed
        session = valid_session or self.session()
        scope[_SCOPE] = await self._visitor(scope, headers, session)

        async def send_with_cookie(message: types.Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                if valid_session is None and b"set-cookie" not in names:
                    message["headers"] = [*message["headers"], self.cookie(session, headers)]
            await send(message)

        await inner(scope, receive, send_with_cookie)

    def session(self, name: str = "") -> sessions.Session:
        """Return a new session."""
        ends_at = time.time() + sessions.LASTS_S
        return sessions.Session(id=secrets.token_hex(_ID_BYTES), name=name, ends_at=ends_at)

    def sign_out(self, session: sessions.Session) -> None:
        """End a session in which somebody has signed in."""
        if session.name:
            self._signed_out.add(session)

    def cookie(self, session: sessions.Session, headers: Mapping[str, str]) -> tuple[bytes, bytes]:
        """Return the header that gives a session to the browser that sent `headers`."""
        sealed = sessions.seal(session, self._key)
        text = sessions.cookie(
            self._cookie_name(headers), sealed, lasts_s=sessions.LASTS_S, is_secure=self.is_secure
        )
        return b"set-cookie", text.encode()

    def sign_in_cookie(
        self, attempt: sessions.SignIn | None, headers: Mapping[str, str]
    ) -> tuple[bytes, bytes]:
        """Return the header that stores an attempt to sign in; None removes the stored one."""
        sealed = sessions.seal(attempt, self._key) if attempt else ""
        lasts_s = sessions.SIGN_IN_S if attempt else 0.0
        name = f"{self._cookie_name(headers)}-sign-in"
        text = sessions.cookie(name, sealed, lasts_s=lasts_s, is_secure=self.is_secure)
        return b"set-cookie", text.encode()

    def attempt(self, request: requests.Request, *, at: float) -> sessions.SignIn | None:
        """Return the attempt to sign in from a cookie; None if missing, invalid or expired."""
        name = f"{self._cookie_name(request.headers)}-sign-in"
        given = _cookies(request.headers).get(name, "")
        return sessions.unseal(given, sessions.SignIn, self._key, at=at)

    def _cookie_name(self, headers: Mapping[str, str]) -> str:
        """Return the cookie's name, which contains the port unless the address uses HTTPS.

        Browsers send a cookie to every port of a host (RFC 6265, 8.5), but several consoles may run
        on one machine, or behind port-forwards, on different ports.
        """
        if self.is_secure:
            return "__Host-muster"
        _, _, port = (self._origin or headers.get("host", "")).rpartition(":")
        return f"muster-{port}" if _PORT.fullmatch(port) else "muster"

    async def form(self, request: requests.Request) -> tuple[identities.Identity, dict[str, str]]:
        """Return who sent a form, and its fields. Raises HTTPException, such as Lapsed."""
        visitor = visitor_of(request)
        assert visitor is not None, "only these requests reach a form"
        origin = self._origin or f"http://{request.headers.get('host', '')}"
        problem = sessions.foreign(request.headers, origin)
        if problem:
            raise _refused(request, 403, problem)
        if request.headers.get("content-type", "") != "application/x-www-form-urlencoded":
            raise _refused(request, 415, "the content of the request is not a form")
        fields = await _fields(request)
        if visitor.session in self._signed_out:
            # somewhere else, while the fields were read
            raise Lapsed(_refused(request, 403, "the session was signed out").detail, fields)
        if visitor.identity is None:
            refused = _refused(request, 403, visitor.why)
            raise Lapsed(refused.detail, fields) if visitor.can_sign_in else refused
        name = visitor.identity.name
        if not sessions.is_token(fields.get("token", ""), visitor.session, name, self._key):
            refused = _refused(request, 403, "the form had expired; check it and send it again")
            raise Lapsed(refused.detail, fields)
        return visitor.identity, fields

    async def _visitor(
        self, scope: types.Scope, headers: datastructures.Headers, session: sessions.Session
    ) -> Visitor:
        identity, why = None, ""
        try:
            identity = await self._identity(scope, headers, session)
        except identities.Unknown as error:
            why = str(error)
        name = identity.name if identity else ""
        return Visitor(
            session=session,
            identity=identity,
            why=why,
            token=sessions.form_token(session, name, self._key),
            can_sign_in=self.settings.oidc is not None,
        )

    async def _identity(
        self, scope: types.Scope, headers: datastructures.Headers, session: sessions.Session
    ) -> identities.Identity:
        """Return who sent the request. Raises Unknown."""
        client, server = scope.get("client"), scope.get("server")
        if self.settings.header is not None:
            return identities.by_header(
                headers.items(), client[0] if client else "", self.settings.header
            )
        if self.settings.oidc is not None:
            if not session.name:
                raise identities.Unknown("you have not signed in")
            return identities.Identity(session.name, identities.Kind.OIDC)
        uid = None
        if client and server:
            ends = identities.Place(*client[:2]), identities.Place(*server[:2])
            uid = await asyncio.to_thread(_owner, *ends)
        if uid is None or uid != os.geteuid():
            raise identities.Unknown(
                "only the user who runs this console may act here, and only from this machine"
            )
        return identities.Identity(self._user, identities.Kind.LOCAL)


def visitor_of(request: requests.Request) -> Visitor | None:
    """Return the visitor who requests a page; None if acting is not configured."""
    visitor: Visitor | None = request.scope.get(_SCOPE)
    return visitor


def _cookies(headers: Mapping[str, str]) -> dict[str, str]:
    pairs = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
    return {name: value for name, _, value in pairs}


def _owner(client: identities.Place, server: identities.Place) -> int | None:
    """Return the user id of the process that sent a request; None if not found on this machine."""
    for path in _TABLES:
        try:
            with path.open("rb") as table:
                text = table.read(_TABLE_BYTES_MAX).decode("ascii", "replace")
            owner = identities.socket_owner(text, client, server)
        except (OSError, ValueError):
            continue
        if owner is not None:
            return owner
    return None


async def _fields(request: requests.Request) -> dict[str, str]:
    """Return the fields of a form. Raises HTTPException."""
    body = b""
    try:
        async with asyncio.timeout(_FORM_WAIT_S):
            async for part in request.stream():
                body += part
                if len(body) > _FORM_BYTES_MAX:
                    raise _refused(request, 413, "the form is too large")
        pairs = urllib.parse.parse_qsl(
            body.decode(), keep_blank_values=True, max_num_fields=_FORM_FIELDS_MAX
        )
    except requests.ClientDisconnect:
        raise _refused(request, 400, "the form did not arrive") from None
    except TimeoutError:
        raise _refused(request, 408, "the form did not arrive in time") from None
    except ValueError:
        raise _refused(request, 400, "the form cannot be read") from None
    return dict(pairs)


def _refused(request: requests.Request, status: int, reason: str) -> HTTPException:
    peer = request.client.host if request.client else ""
    logs.logger().warning(
        "operator_action_refused", path=request.url.path, peer=peer, reason=reason
    )
    return HTTPException(status, f"Nothing was done: {reason}.")

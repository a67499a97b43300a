"""Pure: sessions in signed cookies, and whether a form comes from our own pages (CSRF).

A cookie contains the session and its signature, with a random key that is made when the process
starts. Only the ids of sessions that were signed out are stored. A form is accepted only from our
own origin, and with a token that only the pages of the same session contain; another site cannot
read the token.
"""

import base64
import hashlib
import heapq
import hmac
from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

import msgspec

from muster import codec

LASTS_S: Final = 12 * 3600.0
SIGN_IN_S: Final = 600.0
"""How long signing in may take."""
SIGNED_OUT_MAX: Final = 10_000
_SEALED_MAX: Final = 4_096
_SIGNATURE_BYTES: Final = 32

Sealed = TypeVar("Sealed", bound="Expiring")


class Expiring(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a cookie that expires at `ends_at`, in Unix seconds."""

    ends_at: float


class Session(Expiring, frozen=True, kw_only=True):
    """The session of one browser; `name` is the person who signed in, empty if nobody has."""

    id: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""


class SignIn(Expiring, frozen=True, kw_only=True):
    """An attempt to sign in: the state that the issuer must return, and the attempt's secrets."""

    state: str
    nonce: str
    verifier: str


class SignedOut:
    """The sessions that were signed out.

    Above the limit, the id of the one that expires first is dropped, and all sessions that expire
    as early count as signed out, too. So none becomes valid again.
    """

    def __init__(self, limit: int = SIGNED_OUT_MAX) -> None:
        self._limit = limit
        self._ends: list[tuple[float, str]] = []
        self._ids: set[str] = set()
        self._all_until = 0.0

    def add(self, session: Session) -> None:
        """Sign a session out."""
        if session in self:
            return
        self._ids.add(session.id)
        heapq.heappush(self._ends, (session.ends_at, session.id))
        if len(self._ends) > self._limit:
            self._all_until, id_ = heapq.heappop(self._ends)
            self._ids.remove(id_)

    def __contains__(self, session: Session) -> bool:
        return session.ends_at <= self._all_until or session.id in self._ids


def seal(value: Expiring, key: bytes) -> str:
    """Return a value as text that only the holder of the key can make."""
    payload = _text(msgspec.json.encode(value))
    return f"{payload}.{_text(_signature(key, type(value).__name__, payload))}"


def unseal(text: str, shape: type[Sealed], key: bytes, *, at: float) -> Sealed | None:
    """Return a sealed value; None if its signature or kind is wrong, or if it has expired."""
    payload, _, signature = text.partition(".")
    if len(text) > _SEALED_MAX:
        return None
    try:
        if not hmac.compare_digest(_bytes(signature), _signature(key, shape.__name__, payload)):
            return None
        value = msgspec.json.decode(_bytes(payload), type=shape)
    except (*codec.UNREADABLE, ValueError):
        return None
    return value if at < value.ends_at else None


def form_token(session: Session, name: str, key: bytes) -> str:
    """Return the token of the forms that are shown to a person in a session."""
    return _signature(key, "form", f"{session.id} {name}").hex()


def is_token(given: str, session: Session, name: str, key: bytes) -> bool:
    """Return whether a form has the token of this session and person."""
    return hmac.compare_digest(
        given.encode("utf-8", "replace"), form_token(session, name, key).encode()
    )


def foreign(headers: Mapping[str, str], origin: str) -> str:
    """Return why a form does not come from our own pages at `origin`; empty if it does.

    Browsers send `Origin` with every form, and newer ones `Sec-Fetch-Site`; no script can set them.
    """
    sent = headers.get("origin", "")
    if not sent:
        return "the request has no Origin header, so the page that sent it is unknown"
    if sent.lower() != origin.lower():
        return f"the request comes from another site ({sent[:100]})"
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return "the request comes from another site (Sec-Fetch-Site)"
    return ""


def cookie(name: str, value: str, *, lasts_s: float, is_secure: bool) -> str:
    """Return the value of a Set-Cookie header.

    No script can read the cookie, and browsers do not send it with the forms of other sites.
    """
    secure = "; Secure" if is_secure else ""
    return f"{name}={value}; Path=/; Max-Age={lasts_s:.0f}; HttpOnly; SameSite=Lax{secure}"


def challenge(verifier: str) -> str:
    """Return the challenge of a PKCE verifier (RFC 7636, S256)."""
    return _text(hashlib.sha256(verifier.encode()).digest())


def _signature(key: bytes, purpose: str, text: str) -> bytes:
    return hmac.digest(key, f"{purpose}\0{text}".encode(), hashlib.sha256)


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    """Decode URL-safe base64 that has no padding. Raises ValueError."""
    return base64.b64decode(text.encode("ascii") + b"==", altchars=b"-_", validate=False)

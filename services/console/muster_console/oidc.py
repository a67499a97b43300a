"""Adapter for HTTP: signs people in at an OpenID Connect issuer, by the authorization code flow.

The flow has a state, a nonce and a PKCE verifier (OpenID Connect Core 1.0, 3.1; RFC 7636). The
issuer's metadata and keys are read when they are needed, and again if they are an hour old or if a
token has an unknown key.
"""

import asyncio
import urllib.parse
from pathlib import Path
from typing import Final, TypeVar

import jwt
import msgspec

from muster import codec, http
from muster_console import config, id_token, identities, sessions

_WAIT_S: Final = 10.0
_FRESH_S: Final = 3600.0
_REFRESH_S: Final = 60.0
"""The minimum age of keys before an unknown key in a token causes them to be read again."""
_SECRET_MAX: Final = 4_096
_SUCCESS: Final = 200
_CODE_MAX: Final = 4_096

Shape = TypeVar("Shape")


class Unanswered(Exception):
    """The issuer did not answer validly, or the file with the client's secret is unreadable."""


class _Configuration(msgspec.Struct, frozen=True):
    """The metadata that an issuer publishes (OpenID Connect Discovery 1.0, 3)."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str


class _Tokens(msgspec.Struct, frozen=True):
    id_token: str


class Provider:
    """Signs people in at one issuer; `url` is the address of the console in browsers."""

    def __init__(self, rule: config.Oidc, url: str) -> None:
        self._rule = rule
        self._returns_to = f"{url.rstrip('/')}/signed-in"
        self._configuration: _Configuration | None = None
        self._keys: jwt.PyJWKSet | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def address(self, attempt: sessions.SignIn) -> str:
        """Return the issuer's address for this attempt to sign in. Raises Unanswered."""
        published = await self._published()
        query = {
            "response_type": "code",
            "client_id": self._rule.client_id,
            "redirect_uri": self._returns_to,
            "scope": "openid email profile",
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": sessions.challenge(attempt.verifier),
            "code_challenge_method": "S256",
        }
        separator = "&" if "?" in published.authorization_endpoint else "?"
        return published.authorization_endpoint + separator + urllib.parse.urlencode(query)

    async def identity(
        self, code: str, attempt: sessions.SignIn, *, at: float
    ) -> identities.Identity:
        """Return the person who has signed in. Raises Unanswered and identities.Unknown."""
        published = await self._published()
        fields = {
            "grant_type": "authorization_code",
            "code": code[:_CODE_MAX],
            "redirect_uri": self._returns_to,
            "client_id": self._rule.client_id,
            "code_verifier": attempt.verifier,
        }
        body = urllib.parse.urlencode(fields | await self._secret()).encode()
        tokens = await self._request(published.token_endpoint, _Tokens, body=body)
        if not await self._has_key(tokens.id_token):
            raise identities.Unknown("the token is signed with an unknown key")
        assert self._keys is not None, "read with the configuration"
        return id_token.verify(tokens.id_token, self._keys, self._rule, nonce=attempt.nonce, at=at)

    async def _published(self, *, older_than_s: float = _FRESH_S) -> _Configuration:
        """Return the issuer's metadata; read it and the keys if they are old. Raises Unanswered."""
        try:
            # includes the wait for other reads, so that nobody queues up behind a silent issuer
            async with asyncio.timeout(_WAIT_S), self._reading:
                return await self._read(older_than_s)
        except TimeoutError:
            raise Unanswered(f"the issuer does not answer within {_WAIT_S:g} s") from None

    async def _read(self, older_than_s: float) -> _Configuration:
        """Return the issuer's metadata; if too old, read it and the keys. Raises Unanswered."""
        now = asyncio.get_running_loop().time()
        if self._configuration is not None and now - self._read_at < older_than_s:
            return self._configuration
        place = f"{self._rule.issuer.rstrip('/')}/.well-known/openid-configuration"
        read = await self._request(place, _Configuration)
        if read.issuer != self._rule.issuer:
            raise Unanswered(f"{place} belongs to the issuer {read.issuer[:200]}")
        for endpoint in (read.authorization_endpoint, read.token_endpoint, read.jwks_uri):
            try:
                config.check_encrypted("endpoint", endpoint)
            except ValueError as error:
                raise Unanswered(f"{place}: {error}") from None
        keys = await self._request(read.jwks_uri, dict[str, object])
        try:
            self._keys = jwt.PyJWKSet.from_dict(keys)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unanswered(f"{read.jwks_uri}: {error}") from None
        self._configuration, self._read_at = read, now
        return read

    async def _has_key(self, token: str) -> bool:
        """Return whether a token's key is one of the issuer's; read its keys again if necessary."""
        if self._keys is not None and id_token.has_key(token, self._keys):
            return True
        await self._published(older_than_s=_REFRESH_S)
        return self._keys is not None and id_token.has_key(token, self._keys)

    async def _secret(self) -> dict[str, str]:
        """Return the form field with the client's secret, if there is one. Raises Unanswered."""
        if not self._rule.client_secret_file:
            return {}
        try:
            # read again each time, because it may be rotated
            text = await asyncio.to_thread(Path(self._rule.client_secret_file).read_text, "utf-8")
        except (OSError, ValueError) as error:
            raise Unanswered(f"{self._rule.client_secret_file}: {error}") from None
        return {"client_secret": text.strip()[:_SECRET_MAX]}

    async def _request(self, url: str, shape: type[Shape], *, body: bytes = b"") -> Shape:
        """Return the issuer's answer. Raises Unanswered, whose message contains no secret."""
        headers = {"Accept": "application/json"}
        if body:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            endpoint = http.Endpoint(url, timeout_s=_WAIT_S, user_agent="muster-console")
            answer = await endpoint.request("POST" if body else "GET", headers=headers, body=body)
        except (OSError, ValueError) as error:
            raise Unanswered(f"the issuer does not answer: {error}") from None
        if answer.status != _SUCCESS:
            raise Unanswered(f"{endpoint.where} answered HTTP {answer.status}")
        try:
            return msgspec.json.decode(answer.body, type=shape)
        except codec.UNREADABLE as error:
            raise Unanswered(f"the answer of {endpoint.where} cannot be read: {error}") from None

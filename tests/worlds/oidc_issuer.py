"""A stand-in for an OpenID Connect issuer, which signs everybody in and has real RS256 keys."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from muster_console import sessions
from tests.worlds import token_issuer

CLIENT = "muster"


class Issuer:
    """The HTTP handlers of the issuer; `claims` replace those of its tokens."""

    def __init__(self) -> None:
        self.url = ""
        self.key = "k1"
        self.claims: dict[str, Any] = {}
        self._codes: dict[str, dict[str, str]] = {}

    async def configuration(self, _: web.Request) -> web.Response:
        """Return the issuer's discovery document."""
        names = {"authorization_endpoint": "authorize", "token_endpoint": "token"}
        places = {name: f"{self.url}/{path}" for name, path in names.items()}
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys", **places})

    async def keys(self, _: web.Request) -> web.Response:
        """Return the key set with the public key."""
        return web.json_response({"keys": [token_issuer.jwk(self.key, "RS256")]})

    async def authorize(self, request: web.Request) -> web.Response:
        """Redirect the browser back with a code."""
        query = dict(request.query)
        assert (query["client_id"], query["response_type"]) == (CLIENT, "code")
        assert query["code_challenge_method"] == "S256"
        code = f"code-{len(self._codes)}"
        self._codes[code] = query
        back = f"{query['redirect_uri']}?code={code}&state={query['state']}"
        raise web.HTTPFound(back)

    async def token(self, request: web.Request) -> web.Response:
        """Return an ID token for a code, once, if the code verifier matches."""
        form = await request.post()
        asked = self._codes.pop(str(form["code"]), None)
        if (
            asked is None
            or sessions.challenge(str(form["code_verifier"])) != asked["code_challenge"]
        ):
            return web.json_response({"error": "invalid_grant"}, status=400)
        at = time.time()
        said = {
            "iss": self.url,
            "sub": "u1",
            "aud": CLIENT,
            "exp": int(at + 300),
            "iat": int(at),
            "nonce": asked["nonce"],
            "email": "ann@example.com",
            "email_verified": True,
            **self.claims,
        }
        return web.json_response({"id_token": token_issuer.token(said, self.key)})


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[Issuer]:
    """Serve an issuer; yield it."""
    issuer, application = Issuer(), web.Application()
    application.router.add_get("/.well-known/openid-configuration", issuer.configuration)
    application.router.add_get("/keys", issuer.keys)
    application.router.add_get("/authorize", issuer.authorize)
    application.router.add_post("/token", issuer.token)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield issuer
    finally:
        await runner.cleanup()

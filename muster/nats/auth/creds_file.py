"""Pure: A file of credentials as NATS' own tools write it: a user's token, and the seed of its key.

Nothing in a problem's text comes from the file: it is a secret.
"""

import re
from typing import Final

import msgspec

from muster.nats.auth import jws, jwts, nkeys

_JWT: Final = re.compile(r"-{3,}BEGIN NATS USER JWT-{3,}\s+(\S+)\s+-{3,}END NATS USER JWT-{3,}")
_SEED: Final = re.compile(r"-{3,}BEGIN USER NKEY SEED-{3,}\s+(\S+)\s+-{3,}END USER NKEY SEED-{3,}")
_FILE: Final = """\
-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

Keep this file to yourself: whoever has it is you.

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class BadCredentials(ValueError):
    """What is no file of credentials; the text says what is missing."""


class _User(msgspec.Struct, frozen=True):
    sub: str
    name: str = ""


class Credentials(msgspec.Struct, frozen=True):
    """Who somebody is, and how to show it."""

    jwt: str
    seed: str
    name: str

    def sign(self, nonce: str) -> bytes:
        """Return what answers a server's nonce."""
        key = nkeys.Key.from_seed(self.seed, nkeys.Kind.USER)
        return jws.to_base64(key.sign(nonce.encode())).encode()


def write(jwt: str, key: nkeys.Key) -> str:
    """Return the text of a file of credentials."""
    return _FILE.format(jwt=jwt, seed=key.seed)


def read(text: str) -> Credentials:
    """Return the credentials in a file's text. Raises BadCredentials."""
    jwt, seed = _JWT.search(text), _SEED.search(text)
    if jwt is None or seed is None:
        missing = "token" if jwt is None else "seed"
        raise BadCredentials(f"no credentials: the {missing} is missing")
    try:
        user = jwts.decode(jwt[1], _User, nkeys.Kind.ACCOUNT)
        key = nkeys.Key.from_seed(seed[1], nkeys.Kind.USER)
    except ValueError as error:
        raise BadCredentials(f"no credentials: {error}") from None
    if key.public != user.sub:
        raise BadCredentials("no credentials: the seed is not the token's")
    return Credentials(jwt=jwt[1], seed=seed[1], name=user.name)

"""Adapter: the environment: who we are to NATS, and how we know that it is NATS.

A user and password stand in the address. `NATS_CREDS` is a file of credentials, `NATS_TOKEN_FILE`
one with a token: both are read again for each connection, so that what is renewed is used.
`NATS_CA` has the certificates to believe. Answers come to inboxes of our own: of the user in the
address, the credentials or the token, or at `NATS_INBOX_PREFIX`.
"""

import os
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import msgspec

from muster import codec, vocabulary
from muster.nats.auth import jws, permissions

if TYPE_CHECKING:
    import ssl

    from muster.nats.auth import nkeys


class Unusable(OSError):
    """A file of ours is there and of no use; the text names it, and repeats nothing of it."""


class Options(TypedDict, total=False):
    """What nats-py is told besides the address."""

    inbox_prefix: str
    user_jwt_cb: Callable[[], bytes]
    signature_cb: Callable[[str], bytes]
    token: Callable[[], str]
    tls: "ssl.SSLContext"


def options(url: str) -> Options:
    """Return who we are. Raises OSError for a file that cannot be read or used."""
    found_user = re.match(r"[a-z]+://([^:@/,]+)(:[^@/,]*)?@", url)
    user = urllib.parse.unquote(found_user[1]) if found_user else ""
    found = Options()
    if creds := os.environ.get("NATS_CREDS"):
        user = _credentials(creds).name
        found["user_jwt_cb"] = lambda: _credentials(creds).jwt.encode()  # noqa: PLW0108  # read anew
        found["signature_cb"] = lambda nonce: _credentials(creds).sign(nonce)
    if token := os.environ.get("NATS_TOKEN_FILE"):
        user = _user(_token(token))
        found["token"] = lambda: _token(token)
    if authority := os.environ.get("NATS_CA"):
        # OpenSSL costs memory: only who speaks TLS loads it
        import ssl  # noqa: PLC0415

        found["tls"] = ssl.create_default_context(cafile=authority)
    found["inbox_prefix"] = os.environ.get("NATS_INBOX_PREFIX") or permissions.inbox(user)
    return found


def _credentials(file: str) -> "nkeys.Credentials":
    # as above; and not everybody has the extra `auth`
    try:
        from muster.nats.auth import nkeys  # noqa: PLC0415
    except ImportError as error:
        raise Unusable(f"{file}: pip install 'muster-k8s[auth]' ({error})") from None
    try:
        return nkeys.read_creds(Path(file).read_text("utf-8"))
    except ValueError as error:
        raise Unusable(f"{file}: {error}") from None


def _token(file: str) -> str:
    try:
        token = Path(file).read_text("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    # nats-server takes 4 KiB a line
    if not re.fullmatch(r"[!-~]{1,3500}", token):
        raise Unusable(f"{file}: no token, or one longer than 3,500 letters")
    return token


class _Node(msgspec.Struct, frozen=True):
    name: str


class _Bound(msgspec.Struct, frozen=True):
    node: _Node


class _Claims(msgspec.Struct, frozen=True):
    bound: _Bound = msgspec.field(name="kubernetes.io")


def _user(token: str) -> str:
    """Return the user that the gate makes of a token; it is only for finding our own inboxes."""
    try:
        bound = msgspec.json.decode(jws.split(token).claims, type=_Claims).bound
        return permissions.plugin_user(vocabulary.node_token(bound.node.name))
    except (*codec.UNREADABLE, ValueError):
        return ""

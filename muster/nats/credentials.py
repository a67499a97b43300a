"""Adapter for the environment: reads credentials for NATS and the trusted certificates.

A user and password are part of the address. `NATS_CREDS` is a .creds file, `NATS_TOKEN_FILE` a file
with a token: both are read again for each connection, so that renewed credentials are used.
`NATS_CA` is a file with the trusted certificates. `NATS_SERVER_NAME` is the name in the server's
certificate if it differs from the address. `NATS_CREDS` and `NATS_CA` may also contain the file's
content. Replies arrive in inboxes of this process, named after the user in the address, the .creds
file or the token, or below `NATS_INBOX_PREFIX`.
"""

import base64
import os
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import msgspec

from muster import codec, vocabulary
from muster.nats.auth import permissions

if TYPE_CHECKING:
    import ssl

    from muster.nats.auth import nkeys


_CONTENT: Final = "-----BEGIN "
"""The prefix by which file content is recognised in a variable that usually contains a file name.
"""


class Unusable(OSError):
    """Credentials cannot be used; the text names their file and quotes none of its content."""


class Options(TypedDict, total=False):
    """The options of nats-py for credentials, certificates and inboxes."""

    inbox_prefix: str
    user_jwt_cb: Callable[[], bytes]
    signature_cb: Callable[[str], bytes]
    token: Callable[[], str]
    tls: "ssl.SSLContext"
    tls_hostname: str


def options(url: str) -> Options:
    """Return the options that the environment names. Raises OSError for an unusable file."""
    chosen = Options()
    if creds := os.environ.get("NATS_CREDS"):
        chosen["user_jwt_cb"] = lambda: _credentials(creds).jwt.encode()  # noqa: PLW0108  # read again
        chosen["signature_cb"] = lambda nonce: _credentials(creds).sign(nonce)
    if token := os.environ.get("NATS_TOKEN_FILE"):
        chosen["token"] = lambda: _token(token)
    if authority := os.environ.get("NATS_CA"):
        # OpenSSL costs memory: only a process that uses TLS loads it
        import ssl  # noqa: PLC0415

        is_content = authority.startswith(_CONTENT)
        chosen["tls"] = ssl.create_default_context(
            cafile=None if is_content else authority, cadata=authority if is_content else None
        )
        if server := os.environ.get("NATS_SERVER_NAME"):
            chosen["tls_hostname"] = server
    inbox = os.environ.get("NATS_INBOX_PREFIX") or permissions.inbox(user(url))
    chosen["inbox_prefix"] = inbox
    return chosen


def user(url: str) -> str:
    """Return the user's name; empty if it is not known. Raises OSError for an unusable file."""
    if token := os.environ.get("NATS_TOKEN_FILE"):
        return _user(_token(token))
    if creds := os.environ.get("NATS_CREDS"):
        return _credentials(creds).name
    in_url = re.match(r"[a-z]+://([^:@/,]+)(:[^@/,]*)?@", url)
    return urllib.parse.unquote(in_url[1]) if in_url else ""


def _credentials(named: str) -> "nkeys.Credentials":
    """Return the credentials in a file, or in its content; errors never quote the content."""
    is_content = named.startswith(_CONTENT)
    file = "NATS_CREDS" if is_content else named
    # as above; also, the extra `auth` may not be installed
    try:
        from muster.nats.auth import nkeys  # noqa: PLC0415
    except ImportError as error:
        from muster import commands  # noqa: PLC0415  # only for this message

        raise Unusable(f"{file}: {commands.how_to_install('auth')} ({error})") from None
    try:
        return nkeys.read_creds(named if is_content else Path(file).read_text("utf-8"))
    except ValueError as error:
        raise Unusable(f"{file}: {error}") from None


def _token(file: str) -> str:
    try:
        token = Path(file).read_text("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    # nats-server accepts lines of up to 4 KiB
    if not re.fullmatch(r"[!-~]{1,3500}", token):
        raise Unusable(f"{file}: expected a token of 1 to 3,500 characters")
    return token


class _Node(msgspec.Struct, frozen=True):
    name: str


class _Bound(msgspec.Struct, frozen=True):
    node: _Node


class _Claims(msgspec.Struct, frozen=True):
    bound: _Bound = msgspec.field(name="kubernetes.io")


def _user(token: str) -> str:
    """Return the user that the gate derives from a token, to name inboxes; empty if unknown."""
    try:
        claims = base64.urlsafe_b64decode(token.split(".")[1] + "==")
        bound = msgspec.json.decode(claims, type=_Claims).bound
        return permissions.plugin_user(vocabulary.node_token(bound.node.name))
    except (*codec.UNREADABLE, IndexError, ValueError):
        return ""

"""Door to the environment: who we are to NATS, and how we know that it is NATS.

A user and password stand in the address. `NATS_CREDS` is a file of credentials, `NATS_TOKEN_FILE`
one whose token is read again for each connection, `NATS_CA` the certificates to believe. Answers
come to inboxes of our own, after the user in the address or `NATS_INBOX_PREFIX`.
"""

import os
import re
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from muster import permissions

if TYPE_CHECKING:
    import ssl


class Options(TypedDict, total=False):
    """What nats-py is told besides the address."""

    inbox_prefix: str
    user_credentials: str
    token: str
    tls: "ssl.SSLContext"


def options(url: str) -> Options:
    """Return who we are. Raises OSError for a file that cannot be read."""
    found_user = re.match(r"[a-z]+://([^:@/,]+)(:[^@/,]*)?@", url)
    user = urllib.parse.unquote(found_user[1]) if found_user else ""
    prefix = os.environ.get("NATS_INBOX_PREFIX", "").replace(".", "_")
    found = Options(inbox_prefix=prefix or permissions.inbox(user))
    if creds := os.environ.get("NATS_CREDS"):
        found["user_credentials"] = creds
    if token := os.environ.get("NATS_TOKEN_FILE"):
        found["token"] = Path(token).read_text("utf-8").strip()
    if authority := os.environ.get("NATS_CA"):
        # OpenSSL costs memory: only who speaks TLS loads it
        import ssl  # noqa: PLC0415

        found["tls"] = ssl.create_default_context(cafile=authority)
    return found

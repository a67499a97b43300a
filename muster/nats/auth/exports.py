"""Pure: what the accounts of nats-server export and import, as claims (nats-io/jwt v2).

An account can use a subject of another account only if the other account exports the subject and
the first account imports it, perhaps under another name. `server_conf` writes these exports and
imports for users with passwords.
"""

from typing import TypeAlias

from muster.nats.auth import nkeys, permissions

Claims: TypeAlias = dict[str, object]


def stream(subject: str) -> Claims:
    """Return the export of messages on a subject."""
    return {"name": subject, "subject": subject, "type": "stream"}


def service(subject: str) -> Claims:
    """Return the export of requests on a subject."""
    return {"name": subject, "subject": subject, "type": "service"}


def request(subject: str) -> Claims:
    """Return the export of a request to JetStream."""
    many = {"response_type": "Stream"} if permissions.MANY_ANSWERS in subject else {}
    return service(subject) | many


def imported(account: nkeys.Key, shared: Claims, *, to: str = "") -> Claims:
    """Return an import of subjects that an account exports, mapped to `to` if that is set."""
    whole = {**shared, "account": account.public}
    return whole | {"local_subject": to} if to else whole


def imported_requests(muster: nkeys.Key, account: str) -> list[Claims]:
    """Return the imports by which `account` may send requests to JetStream in muster's account."""
    return [
        imported(muster, service(request), to=permissions.local_subject(request).replace("*", "$1"))
        for request in permissions.imported_requests(account)
    ]

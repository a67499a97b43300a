"""Pure: writes nats-server's accounts from `permissions`, for clients with passwords."""

import json
import re
from collections.abc import Iterable
from typing import Final

from muster.nats.auth import permissions
from muster.nats.auth.permissions import (
    ACCOUNT,
    ANSWER_S,
    AUTH,
    CALLOUT_S,
    CLOSED,
    CONNECTIONS,
    DISCONNECT,
    LABELER,
    LABELS,
    LIMITED,
    PLUGIN_PAYLOAD_MAX,
    PLUGIN_SUBSCRIPTIONS_MAX,
    PLUGINS,
    READER_PAYLOAD_MAX,
    READER_SUBSCRIPTIONS_MAX,
    READERS,
    READING,
    Grant,
)

EXPORTS: Final = """\
    exports: [
      {stream: "$SYS.ACCOUNT.*.CONNECT", account_token_position: 3}
      {stream: "$SYS.ACCOUNT.*.DISCONNECT", account_token_position: 3}
      {stream: "$SYS.SERVER.*.LAMEDUCK", accounts: [MUSTER]}
      {stream: "$SYS.SERVER.*.SHUTDOWN", accounts: [MUSTER]}
    ]
"""
"""The exports of the system account: events about servers, and for each account about its clients.
"""
IMPORTS: Final = """\
    imports: [
      {stream: {account: SYS, subject: "$SYS.ACCOUNT.MUSTER.CONNECT"}, to: muster.nats.connect}
      {stream: {account: SYS, subject: "$SYS.ACCOUNT.MUSTER.DISCONNECT"}
       to: muster.nats.disconnect}
      {stream: {account: SYS, subject: "$SYS.SERVER.*.LAMEDUCK"}, to: muster.nats.lameduck.*}
      {stream: {account: SYS, subject: "$SYS.SERVER.*.SHUTDOWN"}, to: muster.nats.shutdown.*}
    ]
"""
"""The imports of muster's account: its subjects for the events that the system account exports."""
_PLUGINS_LIMITS: Final = f"""\
    # of each connection
    limits: {{max_payload: {PLUGIN_PAYLOAD_MAX}, max_subscriptions: {PLUGIN_SUBSCRIPTIONS_MAX}}}
"""
_READERS_LIMITS: Final = f"""\
    # of each connection
    limits: {{max_payload: {READER_PAYLOAD_MAX}, max_subscriptions: {READER_SUBSCRIPTIONS_MAX}}}
"""
_HEARTBEATS: Final = f"""\
    exports: [
      {{service: "{permissions.HEARTBEATS}", accounts: [MUSTER]}}
    ]
"""
_LABELS: Final = f"""\
      {{service: {{account: MUSTER, subject: "{permissions.LABELS}"}}}}
"""
_PLUGINS_SHARES: Final = """\
    exports: [
      {service: "muster.rpc.>", accounts: [MUSTER]}
    ]
    imports: [
      {service: {account: MUSTER, subject: "muster.heartbeat.>"}}
      {service: {account: MUSTER, subject: "muster.event.>"}}
      {service: {account: MUSTER, subject: "muster.inventory.>"}}
    ]
"""
_TO_PLUGINS: Final = """\
    exports: [
      {service: "muster.heartbeat.>", accounts: [PLUGINS]}
      {service: "muster.event.>", accounts: [PLUGINS]}
      {service: "muster.inventory.>", accounts: [PLUGINS]}
    ]
"""
_MORE_EXPORTS: Final = """\
      {stream: "$SYS.ACCOUNT.PLUGINS.CONNECT", accounts: [MUSTER]}
      {stream: "$SYS.ACCOUNT.PLUGINS.DISCONNECT", accounts: [MUSTER]}
"""
_MORE_IMPORTS: Final = """\
      {stream: {account: SYS, subject: "$SYS.ACCOUNT.PLUGINS.CONNECT"}, to: muster.nats.connect}
      {stream: {account: SYS, subject: "$SYS.ACCOUNT.PLUGINS.DISCONNECT"}
       to: muster.nats.disconnect}
      {service: {account: PLUGINS, subject: "muster.rpc.>"}}
      {service: {account: READERS, subject: "muster.heartbeat.>"}}
"""


_GATE_EXPORTS: Final = """\
      {stream: "$SYS.ACCOUNT.PLUGINS.DISCONNECT", accounts: [MUSTER, AUTH]}
      # every server answers
      {service: "$SYS.REQ.ACCOUNT.PLUGINS.CONNZ", response: stream, accounts: [AUTH]}
      {service: "$SYS.REQ.SERVER.*.KICK", accounts: [AUTH]}
"""
_GATE_SHARES: Final = f"""\
    exports: [{{stream: "{LIMITED}", accounts: [MUSTER]}}]
    imports: [
      {{service: {{account: SYS, subject: "$SYS.REQ.ACCOUNT.PLUGINS.CONNZ"}}, to: {CONNECTIONS}}}
      {{service: {{account: SYS, subject: "$SYS.REQ.SERVER.*.KICK"}}, to: "{DISCONNECT}.*"}}
      {{stream: {{account: SYS, subject: "$SYS.ACCOUNT.PLUGINS.DISCONNECT"}}, to: {CLOSED}}}
    ]
"""
_GATE_IMPORTS: Final = f"""\
      {{stream: {{account: AUTH, subject: "{LIMITED}"}}}}
"""
ISSUER_FILE: Final = "../nats-gate/issuer.conf"
"""The path, relative to accounts.conf, of the file that `muster_gate.issuer` writes."""


def accounts_conf(grants: Iterable[Grant]) -> str:
    """Return accounts.conf for nats-server, with a variable for each password.

    With a grant for the gate, nats-server forwards every client without a password to the gate.
    """
    held = tuple(grants)
    exports, imports, asked = _MORE_EXPORTS, _MORE_IMPORTS, ""
    if any(grant.account == AUTH for grant in held):
        exports = _MORE_EXPORTS.splitlines(keepends=True)[0] + _GATE_EXPORTS
        imports += _GATE_IMPORTS
        asked = f"  {AUTH} {{\n{_users(AUTH, held)}{_GATE_SHARES}  }}\n"
    return (
        "# made by scripts/manifests.py from muster/nats/auth/permissions.py\n"
        f"{_callout(held) if asked else ''}"
        "system_account: SYS\naccounts {\n  SYS {\n"
        f"{_longer(EXPORTS, exports)}  }}\n{asked}"
        f"  {PLUGINS} {{\n{_PLUGINS_LIMITS}{_users(PLUGINS, held)}{_PLUGINS_SHARES}  }}\n"
        f"  {ACCOUNT} {{\n    jetstream: enabled\n{_users(ACCOUNT, held)}"
        f"{_longer(_TO_PLUGINS, _request_exports())}{_longer(IMPORTS, imports)}  }}\n"
        f"  {READERS} {{\n{_READERS_LIMITS}{_users(READERS, held)}"
        f"{_HEARTBEATS}{_request_imports(READERS)}  }}\n"
        f"  {LABELER} {{\n{_users(LABELER, held)}"
        f"{_longer(_request_imports(LABELER), _LABELS)}  }}\n}}\n"
    )


def _request_exports() -> str:
    """Return further exports of muster's account: JetStream requests and label events."""
    lines = [f'      {{service: "{LABELS}", accounts: [{LABELER}]}}\n']
    for request in permissions.imported_requests(READERS):
        kind = "response: stream, " if permissions.MANY_ANSWERS in request else ""
        readers = [a for a in READING if request in permissions.imported_requests(a)]
        lines.append(f'      {{service: "{request}", {kind}accounts: [{", ".join(readers)}]}}\n')
    return "".join(lines)


def _request_imports(account: str) -> str:
    lines = [
        f'      {{service: {{account: {ACCOUNT}, subject: "{request}"}}\n'
        f'       to: "{permissions.local_subject(request)}"}}\n'
        for request in permissions.imported_requests(account)
    ]
    return f"    imports: [\n{''.join(lines)}    ]\n"


def _callout(grants: Iterable[Grant]) -> str:
    users = ", ".join(grant.user for grant in grants)
    return (
        f"include {ISSUER_FILE}\n"
        f"authorization {{\n  timeout: {CALLOUT_S}\n  auth_callout {{\n"
        f"    issuer: $NATS_GATE_ISSUER\n    account: {AUTH}\n"
        f"    # these have passwords; the gate decides about all others\n"
        f"    auth_users: [{users}]\n  }}\n}}\n"
    )


def password_variable(user: str) -> str:
    """Return the name of the environment variable with a user's password."""
    return f"NATS_PASSWORD_{re.sub('[^A-Z0-9]', '_', user.upper())}"


def _longer(block: str, lines: str) -> str:
    """Return a block with lines appended to its list."""
    return block.removesuffix("    ]\n") + lines + "    ]\n"


def _users(account: str, grants: Iterable[Grant]) -> str:
    users = "".join(_user(grant) for grant in grants if grant.account == account)
    return f"    users: [\n{users}    ]\n" if users else ""


def _user(grant: Grant) -> str:
    who = f"user: {json.dumps(grant.user)}, password: ${password_variable(grant.user)}"
    lines = [f"      {{{who}, permissions: {{"]
    for verb, allowed, denied in (
        ("publish", grant.publish, grant.publish_denied),
        ("subscribe", grant.subscribe, grant.subscribe_denied),
    ):
        lines.append(f"        {verb}: {{")
        lines.append(_list("allow", allowed))
        if denied:
            lines.append(_list("deny", denied))
        lines.append("        }")
    if grant.answers:
        lines.append(f'        allow_responses: {{max: 1, expires: "{ANSWER_S}s"}}')
    lines.append("      }}")
    return "".join(f"{line}\n" for line in lines)


def _list(word: str, subjects: Iterable[str]) -> str:
    inside = "".join(f"            {json.dumps(subject)}\n" for subject in subjects)
    return f"          {word}: [\n{inside}          ]"

"""Pure: The receivers of an Alertmanager's file become ours."""

import re
from collections.abc import Callable, Mapping
from typing import Final

from muster_notifier import foreign

_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
_SMTP_PORT: Final = 25
_SMTPS_PORT: Final = 465
"""RFC 8314: encrypted from the start, as Alertmanager has it."""


class Receivers:
    """Makes receivers of ours; `names` says which ones a name of theirs stands for."""

    def __init__(self, read: foreign.Reader, general: Mapping[str, object]) -> None:
        """`general` is what holds where a receiver says nothing."""
        self.names: dict[str, list[str]] = {}
        self._read = read
        self._global = general

    def receiver(self, given: Mapping[str, object], index: int) -> list[foreign.Tree]:
        """Return a receiver of ours for each integration."""
        ways: dict[str, Callable[[Mapping[str, object], str], foreign.Tree | None]] = {
            "webhook_configs": self._webhook,
            "slack_configs": self._slack,
            "pagerduty_configs": self._pagerduty,
            "email_configs": self._email,
            "msteams_configs": self._teams,
            "msteamsv2_configs": self._teams,
        }
        theirs = str(given.get("name", ""))
        base = _NAME.sub("-", theirs).strip("-_")[:50] or f"receiver-{index}"
        taken = {name for names in self.names.values() for name in names}
        mine: list[str] = []
        found: list[foreign.Tree] = []
        for key, make in ways.items():
            for number, item in enumerate(
                self._read.items(given.get(key), f"receivers.{index}.{key}")
            ):
                path = f"receivers.{index}.{key}.{number}"
                config = self._read.mapping(item, path)
                way = make(config, path)
                if way is None:
                    continue
                name, count = base, 2
                while name in taken or name in mine:
                    name, count = f"{base}-{count}", count + 1
                mine.append(name)
                default = key not in {"slack_configs", "email_configs"}
                resolved = bool(config.get("send_resolved", default))
                found.append({"name": name, **way, "send_resolved": resolved})
        self.names[theirs] = mine
        if not mine and len(given) > 1:
            text = "nothing of it is taken: what is routed there is told to nobody"
            self._read.differ(f"receivers.{index}", text)
        self._read.leave(given, f"receivers.{index}", {"name", *ways})
        return found

    def _webhook(self, given: Mapping[str, object], path: str) -> foreign.Tree | None:
        url = self._read.secret(given, path, "url")
        if url is None:
            return None
        found: foreign.Tree = {"url_from": url, "format": "alertmanager", "reach": "loopback"}
        if given.get("max_alerts"):
            found["max_alerts"] = given["max_alerts"]
        if given.get("timeout"):
            found["timeout_s"] = self._read.seconds(given["timeout"], f"{path}.timeout")
        http = self._read.mapping(given.get("http_config") or {}, f"{path}.http_config")
        authorization = self._read.mapping(http.get("authorization") or {}, f"{path}.http_config")
        bearer = self._read.secret(
            authorization, f"{path}.http_config.authorization", "credentials"
        )
        if bearer is not None:
            found["bearer_from"] = bearer
        if bearer is not None and str(authorization.get("type", "Bearer")).lower() != "bearer":
            text = f"{authorization['type']} is none of ours: sent as Bearer"
            self._read.differ(f"{path}.http_config.authorization.type", text)
        self._read.leave(http, f"{path}.http_config", {"authorization"})
        known = {"url", "url_file", "send_resolved", "max_alerts", "timeout", "http_config"}
        self._read.leave(given, path, known)
        return {"webhook": found}

    def _slack(self, given: Mapping[str, object], path: str) -> foreign.Tree | None:
        url = self._read.secret(given, path, "api_url") or self._read.secret(
            self._global, "global", "slack_api_url"
        )
        known = {"api_url", "api_url_file", "channel", "send_resolved"}
        self._read.leave(given, path, known)
        if "channel" in given:
            self._read.differ(f"{path}.channel", "not taken: an incoming webhook has its own")
        if url is None:
            self._read.differ(path, "not taken: no api_url")
            return None
        return {"slack": {"webhook_from": url, "reach": "loopback"}}

    def _pagerduty(self, given: Mapping[str, object], path: str) -> foreign.Tree | None:
        key = self._read.secret(given, path, "routing_key")
        known = {"routing_key", "routing_key_file", "url", "send_resolved"}
        self._read.leave(given, path, known)
        if key is None:
            self._read.differ(path, "not taken: no routing_key (Events API v1 is none of ours)")
            return None
        found: foreign.Tree = {"routing_key_from": key, "reach": "loopback"}
        url = given.get("url") or self._global.get("pagerduty_url")
        return {"pagerduty": found | ({"url": str(url)} if url else {})}

    def _email(self, given: Mapping[str, object], path: str) -> foreign.Tree | None:
        def told(key: str, general: str) -> object:
            return given.get(key, self._global.get(general))

        host, _, port = str(told("smarthost", "smtp_smarthost") or "").rpartition(":")
        sender = told("from", "smtp_from")
        if not host or not sender or not given.get("to"):
            self._read.differ(path, "not taken: smarthost, from and to are needed")
            return None
        encrypted = bool(given.get("require_tls", self._global.get("smtp_require_tls", True)))
        implicit = port == str(_SMTPS_PORT)
        found: foreign.Tree = {
            "host": host,
            "port": int(port) if port.isdigit() else _SMTP_PORT,
            "sender": str(sender),
            "to": [name.strip() for name in str(given["to"]).split(",")],
            "tls": "implicit" if implicit else "starttls" if encrypted else "none",
        }
        username = told("auth_username", "smtp_auth_username")
        password = self._read.secret(given, path, "auth_password") or self._read.secret(
            self._global, "global", "smtp_auth_password"
        )
        if username and password is not None:
            found |= {"username": str(username), "password_from": password}
        elif username:
            self._read.differ(f"{path}.auth_username", "not taken: no auth_password")
        tls = self._read.mapping(given.get("tls_config") or {}, f"{path}.tls_config")
        if tls.get("ca_file"):
            found["ca_file"] = str(tls["ca_file"])
        self._read.leave(tls, f"{path}.tls_config", {"ca_file"})
        known = {"to", "from", "smarthost", "auth_username", "auth_password", "tls_config"}
        self._read.leave(
            given, path, known | {"auth_password_file", "require_tls", "send_resolved"}
        )
        return {"email": found}

    def _teams(self, given: Mapping[str, object], path: str) -> foreign.Tree | None:
        url = self._read.secret(given, path, "webhook_url")
        self._read.leave(given, path, {"webhook_url", "webhook_url_file", "send_resolved"})
        if url is None:
            return None
        return {"teams": {"url_from": url, "reach": "loopback"}}

"""Pure. An Alertmanager configuration file, as it is, becomes settings of ours.

Taken are its route, the receivers webhook, slack, pagerduty, email and msteams, inhibit_rules and
time_intervals. Everything else is named, and so is what will not be quite the same. Secrets stay
where they are: a setting says where in the file one is.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from muster_notifier import labels

Tree = dict[str, object]

_DURATION: Final = re.compile(
    r"(?:(\d+)y)?(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?"
)
_UNITS: Final = (365 * 86_400.0, 7 * 86_400.0, 86_400.0, 3600.0, 60.0, 1.0, 0.001)
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
_SMTP_PORT: Final = 25


class Unreadable(ValueError):
    """The file is no configuration of Alertmanager; the text says why."""


class Importer:
    """Reads one file; `left_out` holds a line for everything that is not taken."""

    def __init__(self, file: str) -> None:
        self.left_out: list[str] = []
        self._file = file
        self._global: Mapping[str, object] = {}
        self._names: dict[str, list[str]] = {}

    def read(self, document: object) -> Tree:
        """Return our settings. Raises Unreadable."""
        top = self._mapping(document, "the file")
        if "route" not in top or "receivers" not in top:
            raise Unreadable("an Alertmanager configuration has `route` and `receivers`")
        self._global = self._mapping(top.get("global") or {}, "global")
        receivers: list[Tree] = []
        for index, item in enumerate(self._items(top.get("receivers"), "receivers")):
            receivers += self._receiver(self._mapping(item, f"receivers.{index}"), index)
        times = [
            *self._items(top.get("time_intervals"), "time_intervals"),
            *self._items(top.get("mute_time_intervals"), "mute_time_intervals"),
        ]
        root = self._route(self._mapping(top["route"], "route"), "route")
        found: Tree = {
            "default_receivers": root.pop("receivers", []),
            "group_by": root.pop("group_by", []),
            "routes": root.pop("routes", []),
            "receivers": receivers,
            "inhibit_rules": [
                self._inhibition(self._mapping(item, f"inhibit_rules.{index}"), index)
                for index, item in enumerate(self._items(top.get("inhibit_rules"), "inhibit_rules"))
            ],
            "time_intervals": [self._time(item, index) for index, item in enumerate(times)],
        }
        for key in ("group_wait_s", "group_interval_s", "repeat_interval_s"):
            if key in root:
                found[key] = root[key]
        known = {"global", "route", "receivers", "inhibit_rules"}
        self._leave(top, "", known | {"time_intervals", "mute_time_intervals"})
        smtp_and_co = ("slack_api_url", "pagerduty_url", "smtp_", "resolve_timeout")
        used = {key for key in self._global if key.startswith(smtp_and_co)}
        self._leave(self._global, "global", used)
        return found

    def _route(self, given: Mapping[str, object], path: str) -> Tree:  # noqa: C901  # key by key
        found: Tree = {}
        if "receiver" in given:
            name = str(given["receiver"])
            if name not in self._names:
                raise Unreadable(f"{path}.receiver: no receiver is called {name}")
            found["receivers"] = self._names[name]
        matchers = self._matchers(given, path, "matchers", "match", "match_re")
        if matchers:
            found["matchers"] = matchers
        if "continue" in given:
            found["continue"] = bool(given["continue"])
        if "group_by" in given:
            names = [str(name) for name in self._items(given["group_by"], f"{path}.group_by")]
            unknown = [name for name in names if name not in {*labels.NAMES, labels.ALL}]
            for name in unknown:
                self._differ(f"{path}.group_by", f"no alert of muster has a label {name}")
            found["group_by"] = [name for name in names if name not in unknown]
        for key in ("group_wait", "group_interval", "repeat_interval"):
            if key in given:
                found[f"{key}_s"] = self._seconds(given[key], f"{path}.{key}")
        for theirs, ours in (
            ("mute_time_intervals", "mute_times"),
            ("active_time_intervals", "active_times"),
        ):
            if given.get(theirs):
                found[ours] = [str(name) for name in self._items(given[theirs], path)]
        below = self._items(given.get("routes"), f"{path}.routes")
        if below:
            found["routes"] = [
                self._route(self._mapping(item, f"{path}.routes.{index}"), f"{path}.routes.{index}")
                for index, item in enumerate(below)
            ]
        known = {"receiver", "matchers", "match", "match_re", "continue", "group_by", "routes"}
        known |= {"group_wait", "group_interval", "repeat_interval"}
        self._leave(given, path, known | {"mute_time_intervals", "active_time_intervals"})
        return found

    def _inhibition(self, given: Mapping[str, object], index: int) -> Tree:
        path = f"inhibit_rules.{index}"
        found: Tree = {
            "source_matchers": self._matchers(
                given, path, "source_matchers", "source_match", "source_match_re"
            ),
            "target_matchers": self._matchers(
                given, path, "target_matchers", "target_match", "target_match_re"
            ),
            "equal": [str(name) for name in self._items(given.get("equal"), f"{path}.equal")],
        }
        if "name" in given:
            found["name"] = str(given["name"])
        known = {"source_matchers", "source_match", "source_match_re", "equal", "name"}
        known |= {"target_matchers", "target_match", "target_match_re"}
        self._leave(given, path, known)
        return found

    def _matchers(
        self, given: Mapping[str, object], path: str, new: str, equal: str, regex: str
    ) -> list[str]:
        found = [str(text) for text in self._items(given.get(new), f"{path}.{new}")]
        for key, operator in ((equal, "="), (regex, "=~")):
            for name, value in self._mapping(given.get(key) or {}, f"{path}.{key}").items():
                shown = str(value).replace("\\", "\\\\").replace('"', '\\"')
                found.append(f'{name}{operator}"{shown}"')
        return found

    def _time(self, given: object, index: int) -> Tree:
        found = self._mapping(given, f"time_intervals.{index}")
        inner = self._items(found.get("time_intervals"), f"time_intervals.{index}")
        return {
            "name": str(found.get("name", "")),
            "time_intervals": [self._times(one, f"time_intervals.{index}") for one in inner],
        }

    def _times(self, given: object, path: str) -> Tree:
        """Return one interval: numbers may stand where we have texts."""
        found: Tree = dict(self._mapping(given, path))
        for key in ("weekdays", "days_of_month", "months", "years"):
            if key in found:
                found[key] = [str(one) for one in self._items(found[key], f"{path}.{key}")]
        return found

    def _receiver(self, given: Mapping[str, object], index: int) -> list[Tree]:
        """Return a receiver of ours for each integration."""
        ways: dict[str, Callable[[Mapping[str, object], str], Tree | None]] = {
            "webhook_configs": self._webhook,
            "slack_configs": self._slack,
            "pagerduty_configs": self._pagerduty,
            "email_configs": self._email,
            "msteams_configs": self._teams,
            "msteamsv2_configs": self._teams,
        }
        theirs = str(given.get("name", ""))
        base = _NAME.sub("-", theirs).strip("-_")[:50] or f"receiver-{index}"
        taken = {name for names in self._names.values() for name in names}
        mine: list[str] = []
        found: list[Tree] = []
        for key, make in ways.items():
            for number, item in enumerate(self._items(given.get(key), f"receivers.{index}.{key}")):
                path = f"receivers.{index}.{key}.{number}"
                config = self._mapping(item, path)
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
        self._names[theirs] = mine
        self._leave(given, f"receivers.{index}", {"name", *ways})
        return found

    def _webhook(self, given: Mapping[str, object], path: str) -> Tree | None:
        url = self._secret(given, path, "url")
        if url is None:
            return None
        found: Tree = {"url_from": url, "format": "alertmanager", "reach": "loopback"}
        if given.get("max_alerts"):
            found["max_alerts"] = given["max_alerts"]
        if given.get("timeout"):
            found["timeout_s"] = self._seconds(given["timeout"], f"{path}.timeout")
        http = self._mapping(given.get("http_config") or {}, f"{path}.http_config")
        authorization = self._mapping(http.get("authorization") or {}, f"{path}.http_config")
        bearer = self._secret(authorization, f"{path}.http_config.authorization", "credentials")
        if bearer is not None:
            found["bearer_from"] = bearer
        self._leave(http, f"{path}.http_config", {"authorization"})
        known = {"url", "url_file", "send_resolved", "max_alerts", "timeout", "http_config"}
        self._leave(given, path, known)
        return {"webhook": found}

    def _slack(self, given: Mapping[str, object], path: str) -> Tree | None:
        url = self._secret(given, path, "api_url") or self._secret(
            self._global, "global", "slack_api_url"
        )
        self._leave(given, path, {"api_url", "api_url_file", "channel", "send_resolved"})
        if url is None:
            self._differ(path, "not taken: no api_url")
            return None
        return {"slack": {"webhook_from": url, "reach": "loopback"}}

    def _pagerduty(self, given: Mapping[str, object], path: str) -> Tree | None:
        key = self._secret(given, path, "routing_key")
        known = {"routing_key", "routing_key_file", "url", "send_resolved"}
        self._leave(given, path, known)
        if key is None:
            self._differ(path, "not taken: no routing_key (Events API v1 is none of ours)")
            return None
        found: Tree = {"routing_key_from": key, "reach": "loopback"}
        url = given.get("url") or self._global.get("pagerduty_url")
        return {"pagerduty": found | ({"url": str(url)} if url else {})}

    def _email(self, given: Mapping[str, object], path: str) -> Tree | None:
        def told(key: str, general: str) -> object:
            return given.get(key, self._global.get(general))

        host, _, port = str(told("smarthost", "smtp_smarthost") or "").rpartition(":")
        sender = told("from", "smtp_from")
        if not host or not sender or not given.get("to"):
            self._differ(path, "not taken: smarthost, from and to are needed")
            return None
        encrypted = bool(given.get("require_tls", self._global.get("smtp_require_tls", True)))
        found: Tree = {
            "host": host,
            "port": int(port) if port.isdigit() else _SMTP_PORT,
            "sender": str(sender),
            "to": [name.strip() for name in str(given["to"]).split(",")],
            "tls": "starttls" if encrypted else "none",
        }
        username = told("auth_username", "smtp_auth_username")
        password = self._secret(given, path, "auth_password") or self._secret(
            self._global, "global", "smtp_auth_password"
        )
        if username and password is not None:
            found |= {"username": str(username), "password_from": password}
        tls = self._mapping(given.get("tls_config") or {}, f"{path}.tls_config")
        if tls.get("ca_file"):
            found["ca_file"] = str(tls["ca_file"])
        self._leave(tls, f"{path}.tls_config", {"ca_file"})
        known = {"to", "from", "smarthost", "auth_username", "auth_password", "tls_config"}
        self._leave(given, path, known | {"auth_password_file", "require_tls", "send_resolved"})
        return {"email": found}

    def _teams(self, given: Mapping[str, object], path: str) -> Tree | None:
        url = self._secret(given, path, "webhook_url")
        self._leave(given, path, {"webhook_url", "webhook_url_file", "send_resolved"})
        if url is None:
            return None
        return {"teams": {"url_from": url, "reach": "loopback"}}

    def _secret(self, given: Mapping[str, object], path: str, key: str) -> Tree | None:
        """Return where a secret is: in a file of its own, or in this one."""
        if given.get(f"{key}_file"):
            return {"file": str(given[f"{key}_file"])}
        return {"file": self._file, "at": f"{path}.{key}"} if given.get(key) else None

    def _seconds(self, given: object, path: str) -> float:
        found = _DURATION.fullmatch(str(given))
        if found is None or not any(found.groups()):
            raise Unreadable(f"{path}: {given!r} is no duration such as 5m")
        return sum(int(n or 0) * unit for n, unit in zip(found.groups(), _UNITS, strict=True))

    def _leave(self, given: Mapping[str, object], path: str, known: set[str]) -> None:
        for key in given:
            if key not in known:
                self._differ(f"{path}.{key}".lstrip("."), "not taken")

    def _differ(self, path: str, text: str) -> None:
        line = f"{path}: {text}"
        if line not in self.left_out:
            self.left_out.append(line)

    def _mapping(self, given: object, path: str) -> dict[str, object]:
        if not isinstance(given, Mapping):
            raise Unreadable(f"{path}: a mapping is expected")
        return {str(key): value for key, value in given.items()}

    def _items(self, given: object, path: str) -> list[object]:
        if given is None:
            return []
        if not isinstance(given, list):
            raise Unreadable(f"{path}: a list is expected")
        return list(given)

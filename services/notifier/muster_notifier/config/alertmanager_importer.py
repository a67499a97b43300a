"""Pure: imports an Alertmanager configuration file as settings of the notifier.

Imported are its route, the receivers webhook, slack, pagerduty, email and msteams, inhibit_rules
and time_intervals. Everything else is reported as left out, and so is what will differ. Secrets
stay where they are: a setting says where in the file one is.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from muster import matchers, silences
from muster_notifier.routing import routes

Tree = dict[str, object]

_DURATION: Final = re.compile(
    r"(?:(\d+)y)?(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?"
)
_UNITS: Final = (365 * 86_400.0, 7 * 86_400.0, 86_400.0, 3600.0, 60.0, 1.0, 0.001)
_WHY: Final = {
    "global.resolve_timeout": "not needed: health says itself when an alert is over",
    "templates": "not taken: templates of ours are in docs/notifier.md",
}
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
_SMTP_PORT: Final = 25
_SMTPS_PORT: Final = 465
"""RFC 8314: encrypted from the start, as Alertmanager has it."""
_MINUTES: Final = 60
_GLOBAL: Final = {
    *("smtp_smarthost", "smtp_from", "smtp_require_tls", "smtp_auth_username"),
    *("smtp_auth_password", "smtp_auth_password_file", "slack_api_url", "slack_api_url_file"),
    "pagerduty_url",
}


class Unreadable(ValueError):
    """The file is no configuration of its kind; the text says why."""


class TreeReader:
    """Reads one file; `left_out` holds a line for everything that is not taken."""

    def __init__(self, file: str) -> None:
        self.left_out: list[str] = []
        self._file = file

    def secret(self, given: Mapping[str, object], path: str, key: str) -> Tree | None:
        """Return where a secret is: in a file of its own, or in this one."""
        if given.get(f"{key}_file"):
            return {"file": str(given[f"{key}_file"])}
        return {"file": self._file, "at": f"{path}.{key}"} if given.get(key) else None

    def seconds(self, given: object, path: str) -> float:
        """Return a duration such as `5m`. Raises Unreadable."""
        found = _DURATION.fullmatch(str(given))
        if found is None or not any(found.groups()):
            raise Unreadable(f"{path}: {given!r} is no duration such as 5m")
        return sum(int(n or 0) * unit for n, unit in zip(found.groups(), _UNITS, strict=True))

    def leave(self, given: Mapping[str, object], path: str, known: Collection[str]) -> None:
        """Name what is not known."""
        for key in given:
            if key not in known:
                full = f"{path}.{key}".lstrip(".")
                self.differ(full, _WHY.get(full, "not taken"))

    def differ(self, path: str, text: str) -> None:
        """Say once what is not the same."""
        line = f"{path}: {text}"
        if line not in self.left_out:
            self.left_out.append(line)

    def mapping(self, given: object, path: str) -> dict[str, object]:
        """Return a mapping. Raises Unreadable."""
        if not isinstance(given, Mapping):
            raise Unreadable(f"{path}: a mapping is expected")
        return {str(key): value for key, value in given.items()}

    def items(self, given: object, path: str) -> list[object]:
        """Return a list, empty for nothing. Raises Unreadable."""
        if given is None:
            return []
        if not isinstance(given, list):
            raise Unreadable(f"{path}: a list is expected")
        return list(given)


class ReceiverImporter:
    """Makes receivers of ours; `names` says which ones a name of theirs stands for."""

    def __init__(self, read: TreeReader, general: Mapping[str, object]) -> None:
        """`general` is what holds where a receiver says nothing."""
        self.names: dict[str, list[str]] = {}
        self._read = read
        self._global = general

    def receiver(self, given: Mapping[str, object], index: int) -> list[Tree]:
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
        taken = {name for names in self.names.values() for name in names}
        mine: list[str] = []
        found: list[Tree] = []
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

    def _webhook(self, given: Mapping[str, object], path: str) -> Tree | None:
        url = self._read.secret(given, path, "url")
        if url is None:
            return None
        found: Tree = {"url_from": url, "format": "alertmanager", "reach": "loopback"}
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

    def _slack(self, given: Mapping[str, object], path: str) -> Tree | None:
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

    def _pagerduty(self, given: Mapping[str, object], path: str) -> Tree | None:
        key = self._read.secret(given, path, "routing_key")
        known = {"routing_key", "routing_key_file", "url", "send_resolved"}
        self._read.leave(given, path, known)
        if key is None:
            self._read.differ(path, "not taken: no routing_key (Events API v1 is none of ours)")
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
            self._read.differ(path, "not taken: smarthost, from and to are needed")
            return None
        encrypted = bool(given.get("require_tls", self._global.get("smtp_require_tls", True)))
        implicit = port == str(_SMTPS_PORT)
        found: Tree = {
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

    def _teams(self, given: Mapping[str, object], path: str) -> Tree | None:
        url = self._read.secret(given, path, "webhook_url")
        self._read.leave(given, path, {"webhook_url", "webhook_url_file", "send_resolved"})
        if url is None:
            return None
        return {"teams": {"url_from": url, "reach": "loopback"}}


class Importer:
    """Reads one file."""

    def __init__(self, file: str) -> None:
        self._read = TreeReader(file)
        self._receivers = ReceiverImporter(self._read, {})

    @property
    def left_out(self) -> list[str]:
        """A line for everything that is not taken, or not quite the same."""
        return self._read.left_out

    def read(self, document: object) -> Tree:
        """Return our settings. Raises foreign.Unreadable."""
        top = self._read.mapping(document, "the file")
        if "route" not in top or "receivers" not in top:
            raise Unreadable("an Alertmanager configuration has `route` and `receivers`")
        general = self._read.mapping(top.get("global") or {}, "global")
        self._receivers = ReceiverImporter(self._read, general)
        receivers: list[Tree] = []
        for index, item in enumerate(self._read.items(top.get("receivers"), "receivers")):
            receivers += self._receivers.receiver(
                self._read.mapping(item, f"receivers.{index}"), index
            )
        times = [
            *self._read.items(top.get("time_intervals"), "time_intervals"),
            *self._read.items(top.get("mute_time_intervals"), "mute_time_intervals"),
        ]
        root = self._route(self._read.mapping(top["route"], "route"), "route")
        if root is None:
            raise Unreadable("route: the root has matchers that no alert of muster meets")
        rules = [
            self._inhibition(self._read.mapping(item, f"inhibit_rules.{index}"), index)
            for index, item in enumerate(
                self._read.items(top.get("inhibit_rules"), "inhibit_rules")
            )
        ]
        found: Tree = {
            "default_receivers": root.pop("receivers", []),
            "group_by": root.pop("group_by", []),
            "routes": root.pop("routes", []),
            "receivers": receivers,
            "inhibit_rules": [one for one in rules if one is not None],
            "time_intervals": [self._time(item, index) for index, item in enumerate(times)],
        }
        for key in ("group_wait_s", "group_interval_s", "repeat_interval_s"):
            if key in root:
                found[key] = root[key]
        known = {"global", "route", "receivers", "inhibit_rules"}
        self._read.leave(top, "", known | {"time_intervals", "mute_time_intervals"})
        self._read.leave(general, "global", _GLOBAL)
        return found

    def _route(self, given: Mapping[str, object], path: str) -> Tree | None:  # noqa: C901  # key by key
        found: Tree = {}
        if "receiver" in given:
            name = str(given["receiver"])
            if name not in self._receivers.names:
                raise Unreadable(f"{path}.receiver: no receiver is called {name}")
            found["receivers"] = self._receivers.names[name]
        asked = self._matchers(given, path, "matchers", "match", "match_re")
        if asked is None:
            return None
        if asked:
            found["matchers"] = asked
        if "continue" in given:
            found["continue"] = bool(given["continue"])
        if "group_by" in given:
            names = [str(name) for name in self._read.items(given["group_by"], f"{path}.group_by")]
            unknown = [
                name for name in names if name not in {*routes.LABEL_NAMES, routes.ALL_LABELS}
            ]
            for name in unknown:
                self._read.differ(f"{path}.group_by", f"no alert of muster has a label {name}")
            found["group_by"] = [name for name in names if name not in unknown]
        for key in ("group_wait", "group_interval", "repeat_interval"):
            if key in given:
                found[f"{key}_s"] = self._read.seconds(given[key], f"{path}.{key}")
        for theirs, ours in (
            ("mute_time_intervals", "mute_times"),
            ("active_time_intervals", "active_times"),
        ):
            if given.get(theirs):
                found[ours] = [str(name) for name in self._read.items(given[theirs], path)]
        below = self._read.items(given.get("routes"), f"{path}.routes")
        if below:
            taken = [
                self._route(
                    self._read.mapping(item, f"{path}.routes.{index}"), f"{path}.routes.{index}"
                )
                for index, item in enumerate(below)
            ]
            found["routes"] = [one for one in taken if one is not None]
        known = {"receiver", "matchers", "match", "match_re", "continue", "group_by", "routes"}
        known |= {"group_wait", "group_interval", "repeat_interval"}
        self._read.leave(given, path, known | {"mute_time_intervals", "active_time_intervals"})
        return found

    def _inhibition(self, given: Mapping[str, object], index: int) -> Tree | None:
        path = f"inhibit_rules.{index}"
        known = {"source_matchers", "source_match", "source_match_re", "equal", "name"}
        known |= {"target_matchers", "target_match", "target_match_re"}
        self._read.leave(given, path, known)
        source, target = (
            self._matchers(given, path, f"{side}_matchers", f"{side}_match", f"{side}_match_re")
            for side in ("source", "target")
        )
        equal = [str(name) for name in self._read.items(given.get("equal"), f"{path}.equal")]
        here = [name for name in equal if name in routes.LABEL_NAMES]
        unknown = ", ".join(name for name in equal if name not in here)
        if not source or not target:
            self._read.differ(path, "not taken: no alert of muster meets it, or every one does")
            return None
        if unknown and not here:
            text = f"not taken: no alert of muster has {unknown}, so it would hold between all"
            self._read.differ(path, text)
            return None
        if unknown:
            self._read.differ(f"{path}.equal", f"no alert of muster has {unknown}: left out")
        found: Tree = {"source_matchers": source, "target_matchers": target, "equal": here}
        return found | ({"name": str(given["name"])} if "name" in given else {})

    def _matchers(
        self, given: Mapping[str, object], path: str, new: str, equal: str, regex: str
    ) -> list[str] | None:
        """Return matchers, without those that every alert of muster meets; None if none can."""
        found = [str(text) for text in self._read.items(given.get(new), f"{path}.{new}")]
        for key, operator in ((equal, "="), (regex, "=~")):
            for name, value in self._read.mapping(given.get(key) or {}, f"{path}.{key}").items():
                shown = str(value).replace("\\", "\\\\").replace('"', '\\"')
                found.append(f'{name}{operator}"{shown}"')
        met = [one for one in _parsed(found) if silences.doubt(one)]
        never = [one for one in met if not one.holds({})]
        for one in met:
            why = silences.doubt(one).partition(";")[0]
            shown = "not taken" if never else "left out, as it always holds"
            self._read.differ(f"{path}.{new}", f"{one}: {why}: {shown}")
        if never:
            return None
        return [text for text in found if not any(map(silences.doubt, _parsed([text])))]

    def _time(self, given: object, index: int) -> Tree:
        found = self._read.mapping(given, f"time_intervals.{index}")
        inner = self._read.items(found.get("time_intervals"), f"time_intervals.{index}")
        return {
            "name": str(found.get("name", "")),
            "time_intervals": [self._times(one, f"time_intervals.{index}") for one in inner],
        }

    def _times(self, given: object, path: str) -> Tree:
        """Return one interval: numbers may stand where we have texts."""
        found: Tree = dict(self._read.mapping(given, path))
        for key in ("weekdays", "days_of_month", "months", "years"):
            if key in found:
                given_ = self._read.items(found[key], f"{path}.{key}")
                found[key] = [_text(one, is_year=key == "years") for one in given_]
        return found


def _text(given: object, *, is_year: bool) -> str:
    """Return a range as it was written: YAML takes 1:12 for a number, of minutes."""
    if isinstance(given, int) and given >= _MINUTES and not is_year:
        return f"{given // _MINUTES}:{given % _MINUTES}"
    return str(given)


def _parsed(texts: Sequence[str]) -> Sequence[matchers.Matcher]:
    """Return the matchers; what is none is refused elsewhere, with its path."""
    try:
        return matchers.parse_all(texts)
    except ValueError:
        return ()

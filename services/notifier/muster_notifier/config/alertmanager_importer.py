"""Pure: converts an Alertmanager configuration file to settings of the notifier.

It imports the route, inhibit_rules, time_intervals, and receivers of the kinds webhook, slack,
pagerduty, email and msteams. Everything else is reported as left out; differences are reported as
well. An omission is a loss if it can leave somebody without notifications. Secrets stay in the
file, and settings refer to them by path. Relative paths are relative to the file's directory.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from muster import matching
from muster_notifier.config import alertmanager_file
from muster_notifier.routing import routes

Tree = alertmanager_file.Tree
_Section = alertmanager_file.Section
_Unreadable = alertmanager_file.Unreadable

_PUBLIC: Final = re.compile(
    r"https://[a-z0-9.-]+\.(?:(?:slack|slack-gov|pagerduty|webhook\.office|logic\.azure"
    r"|api\.powerplatform)\.com)(?:/.*)?"
)
_REACH_WHY: Final = (
    "imported with reach: loopback, because Alertmanager may send anywhere; if the address is "
    "public, remove reach, so that private addresses and this machine are refused"
)
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
_SMTP_PORT: Final = 25
_SMTPS_PORT: Final = 465
"""The port for mail with implicit TLS (RFC 8314), as in Alertmanager."""
_MINUTES: Final = 60
_GLOBAL: Final = (
    *("smtp_smarthost", "smtp_from", "smtp_require_tls", "smtp_auth_username"),
    *("smtp_auth_password", "smtp_auth_password_file", "slack_api_url", "slack_api_url_file"),
    "pagerduty_url",
)


_ACCESS: Final = (
    *("basic_auth", "oauth2", "bearer_token", "bearer_token_file", "tls_config"),
    *("proxy_url", "proxy_from_environment", "proxy_connect_header", "http_headers"),
)


class Importer:
    """Converts one file; `losses` lists omissions that can leave somebody without notifications.

    `left_out` lists the other parts that are left out, and those that work differently.
    """

    def __init__(self, file: str) -> None:
        self.left_out: list[str] = []
        self.losses: list[str] = []
        self._file = file
        self._receiver_names: dict[str, list[str]] = {}
        """The names of muster's receivers that were imported from each receiver in the file."""

    def read(self, document: object) -> Tree:
        """Convert a parsed file to the notifier's settings. Raises Unreadable."""
        alertmanager_file.refuse_manifest(document)
        top = _Section(document, "", self._file, self.left_out, self.losses)
        if "route" not in top or "receivers" not in top:
            raise _Unreadable("not an Alertmanager configuration: route or receivers is missing")
        general = top.section("global")
        receivers = [
            imported
            for index, section in enumerate(top.sections("receivers"))
            for imported in self._receiver(section, general, index)
        ]
        root = self._route(top.section("route"))
        if root is None:
            raise _Unreadable("route: no muster alert matches the root's matchers")
        rules = [_inhibit_rule(section) for section in top.sections("inhibit_rules")]
        times = [*top.sections("time_intervals"), *top.sections("mute_time_intervals")]
        keys = ("group_wait_s", "group_interval_s", "repeat_interval_s")
        settings: Tree = {
            "default_receivers": root.get("receivers", []),
            "group_by": root.get("group_by", []),
            "routes": root.get("routes", []),
            # as in Alertmanager, resolved alerts wait for the group's next notification
            "resolve_wait_s": None,
            "receivers": receivers,
            "inhibit_rules": [rule for rule in rules if rule is not None],
            "time_intervals": [_time_interval(section) for section in times],
            **{key: root[key] for key in keys if key in root},
        }
        top.leave_out_others()
        general.leave_out_others(*_GLOBAL)
        self._note_unreached(root)
        return settings

    def _note_unreached(self, root: Tree) -> None:
        """Report receivers that no imported route leads to, and a root route without a receiver."""
        reached = set(_reached(root))
        for name, own in self._receiver_names.items():
            if own and reached.isdisjoint(own):
                text = "no imported route leads to it, so it gets no muster alerts"
                self.losses.append(f"receiver {name}: {text}")
        if not root.get("receivers"):
            text = "so nobody is notified of alerts that match no other route"
            self.losses.append(f"route.receiver: no receiver is imported, {text}")

    def _receiver(self, receiver: _Section, general: _Section, index: int) -> Iterator[Tree]:
        """Yield the settings of one of muster's receivers for each integration that is imported."""
        name = str(receiver.get("name", ""))
        base = _NAME.sub("-", name).strip("-_")[:50] or f"receiver-{index}"
        own: list[str] = []
        taken = {used for names in self._receiver_names.values() for used in names}
        for key in (key for key in receiver.names() if key.endswith("_configs")):
            if key not in _WAYS and receiver.items(key):
                receiver.lose(
                    key, "receivers of this kind are not imported and get no notifications"
                )
        for key, convert in _WAYS.items():
            for section in receiver.sections(key):
                way = convert(section, general)
                if way is None:
                    continue
                unique, count = base, 2
                while unique in taken or unique in own:
                    unique, count = f"{base}-{count}", count + 1
                own.append(unique)
                default = key not in {"slack_configs", "email_configs"}
                resolved = bool(section.get("send_resolved", default))
                yield {"name": unique, **way, "send_resolved": resolved}
        self._receiver_names[name] = own
        if not own:
            text = "no part of it is imported, so nobody is notified of alerts routed to it"
            (receiver.lose if receiver.has_integrations else receiver.differ)("", text)
        receiver.leave_out_others()

    def _route(self, route: _Section) -> Tree | None:  # noqa: C901  # key by key
        settings: Tree = {}
        if "receiver" in route:
            name = str(route.get("receiver"))
            if name not in self._receiver_names:
                raise _Unreadable(f"{route.path}.receiver: no receiver is called {name}")
            settings["receivers"] = self._receiver_names[name]
        conditions = _matchers(route, "matchers", "match", "match_re")
        if conditions is None:
            return None
        if conditions:
            settings["matchers"] = conditions
        if "continue" in route:
            settings["continue"] = bool(route.get("continue"))
        if "group_by" in route:
            known, unknown = route.labels("group_by", (*routes.LABEL_NAMES, routes.ALL_LABELS))
            for name in unknown:
                route.differ("group_by", f"no muster alert has a label {name}")
            settings["group_by"] = known
        for key in ("group_wait", "group_interval", "repeat_interval"):
            if key in route:
                settings[f"{key}_s"] = route.seconds(key)
        for key, ours in (
            ("mute_time_intervals", "mute_times"),
            ("active_time_intervals", "active_times"),
        ):
            if route.get(key):
                settings[ours] = [str(name) for name in route.items(key)]
        children = [self._route(child) for child in route.sections("routes")]
        if children:
            settings["routes"] = [child for child in children if child is not None]
        route.leave_out_others()
        return settings


def _webhook(section: _Section, _: _Section) -> Tree | None:
    url = section.secret("url")
    if url is None:
        section.lose("", "not imported, because url is missing")
        return None
    settings: Tree = {"url_from": url, "format": "alertmanager", **_reach(section, "url")}
    if section.get("max_alerts"):
        settings["max_alerts"] = section.get("max_alerts")
    if section.get("timeout"):
        settings["timeout_s"] = section.seconds("timeout")
    http = section.section("http_config")
    authorization = http.section("authorization")
    bearer = authorization.secret("credentials")
    if bearer is not None:
        settings["bearer_from"] = bearer
        scheme = str(authorization.get("type", "Bearer"))
        if scheme.lower() != "bearer":
            authorization.lose("type", f"{scheme} is not supported; sent as Bearer")
    _lose_access(http)
    section.leave_out_others("send_resolved")
    return {"webhook": settings}


def _slack(section: _Section, general: _Section) -> Tree | None:
    url = section.secret("api_url") or general.secret("slack_api_url")
    section.leave_out_others("channel", "send_resolved")
    if "channel" in section:
        section.differ("channel", "not imported, because an incoming webhook has a fixed channel")
    if url is None:
        section.lose("", "not imported, because api_url is missing")
        return None
    _lose_access(section.section("http_config"))
    written = section if section.secret("api_url") else general
    key = "api_url" if section.secret("api_url") else "slack_api_url"
    return {"slack": {"webhook_from": url, **_reach(section, "api_url", written.get(key))}}


def _pagerduty(section: _Section, general: _Section) -> Tree | None:
    key = section.secret("routing_key")
    section.leave_out_others("url", "send_resolved")
    if key is None:
        text = "routing_key is missing (service_key is for Events API v1)"
        section.lose("", f"not imported, because {text}")
        return None
    url = section.get("url") or general.get("pagerduty_url")
    settings: Tree = {"routing_key_from": key}
    if url:
        settings |= {"url": str(url), **_reach(section, "url", url)}
    return {"pagerduty": settings}


def _email(section: _Section, general: _Section) -> Tree | None:
    def value(key: str, default: object = None) -> object:
        return section.get(key, general.get(f"smtp_{key}", default))

    host, _, port = str(value("smarthost") or "").rpartition(":")
    sender, to = value("from"), section.get("to")
    if not host or not sender or not to:
        section.lose("", "not imported, because smarthost, from and to are required")
        return None
    is_implicit = port == str(_SMTPS_PORT)
    is_encrypted = bool(value("require_tls", default=True))
    settings: Tree = {
        "host": host,
        "port": int(port) if port.isdigit() else _SMTP_PORT,
        "sender": str(sender),
        "to": [name.strip() for name in str(to).split(",")],
        "tls": "implicit" if is_implicit else "starttls" if is_encrypted else "none",
    }
    username = value("auth_username")
    password = section.secret("auth_password") or general.secret("smtp_auth_password")
    if username and password is not None:
        settings |= {"username": str(username), "password_from": password}
    elif username:
        text = "not imported without auth_password, so the relay may refuse mail"
        section.lose("auth_username", text)
    tls = section.section("tls_config")
    if tls.get("ca_file"):
        settings["ca_file"] = tls.resolved(str(tls.get("ca_file")))
    tls.leave_out_others()
    section.leave_out_others("send_resolved")
    return {"email": settings}


def _teams(section: _Section, _: _Section) -> Tree | None:
    url = section.secret("webhook_url")
    section.leave_out_others("send_resolved")
    if url is None:
        section.lose("", "not imported, because webhook_url is missing")
        return None
    return {"teams": {"url_from": url, **_reach(section, "webhook_url")}}


def _lose_access(http: _Section) -> None:
    """Report access settings as losses: without them, the receiver may refuse notifications."""
    for key in http.names():
        if key in _ACCESS:
            http.lose(key, "not imported; the receiver may refuse notifications without it")
    http.leave_out_others(*_ACCESS)


def _reach(section: _Section, key: str, url: object = None) -> Tree:
    """Return the `reach` setting for a URL: empty for known public services, else loopback."""
    if _PUBLIC.fullmatch(str(url or section.get(key))):
        return {}
    section.differ(key, _REACH_WHY)
    return {"reach": "loopback"}


_WAYS: Final[Mapping[str, Callable[[_Section, _Section], Tree | None]]] = {
    "webhook_configs": _webhook,
    "slack_configs": _slack,
    "pagerduty_configs": _pagerduty,
    "email_configs": _email,
    "msteams_configs": _teams,
    "msteamsv2_configs": _teams,
}


def _reached(route: Tree) -> Iterator[str]:
    """Yield the receivers of a converted route and of all routes below it."""
    for key, value in route.items():
        if key == "receivers" and isinstance(value, list):
            yield from map(str, value)
        elif key == "routes" and isinstance(value, list):
            for child in value:
                yield from _reached(child)


def _inhibit_rule(rule: _Section) -> Tree | None:
    known = ("source_matchers", "source_match", "source_match_re", "equal", "name")
    rule.leave_out_others(*known, "target_matchers", "target_match", "target_match_re")
    source = _matchers(rule, "source_matchers", "source_match", "source_match_re")
    target = _matchers(rule, "target_matchers", "target_match", "target_match_re")
    equal, unknown = rule.labels("equal", routes.LABEL_NAMES)
    shown = ", ".join(unknown)
    if not source or not target:
        rule.differ("", "not imported, because no muster alert matches it, or every alert does")
        return None
    if unknown and not equal:
        text = f"not imported, because no muster alert has {shown}: it would apply to all alerts"
        rule.differ("", text)
        return None
    if unknown:
        rule.differ("equal", f"no muster alert has {shown}; left out")
    settings: Tree = {"source_matchers": source, "target_matchers": target, "equal": equal}
    return settings | ({"name": str(rule.get("name"))} if "name" in rule else {})


def _matchers(section: _Section, key: str, equal: str, regex: str) -> list[str] | None:
    """Return the matchers, except those that match every alert; None if they match no alert."""
    texts = [str(text) for text in section.items(key)]
    for old_key, operator in ((equal, "="), (regex, "=~")):
        for name, value in section.section(old_key).pairs():
            shown = str(value).replace("\\", "\\\\").replace('"', '\\"')
            texts.append(f'{name}{operator}"{shown}"')
    useless = [matcher for matcher in _parsed(texts) if matching.doubt(matcher)]
    is_never_met = not all(matcher.holds({}) for matcher in useless)
    for matcher in useless:
        why = matching.doubt(matcher).partition(";")[0]
        effect = "not imported" if is_never_met else "left out, as it always matches"
        section.differ(key, f"{matcher} is {effect}: {why}")
    if is_never_met:
        return None
    return [text for text in texts if not any(map(matching.doubt, _parsed([text])))]


def _parsed(texts: Sequence[str]) -> Sequence[matching.Matcher]:
    """Return the parsed matchers; empty if one is invalid, which `settings.validate` reports."""
    try:
        return matching.parse_all(texts)
    except ValueError:
        return ()


def _time_interval(named: _Section) -> Tree:
    intervals = [dict(section.pairs()) for section in named.sections("time_intervals")]
    for interval, section in zip(intervals, named.sections("time_intervals"), strict=True):
        for key in ("weekdays", "days_of_month", "months", "years"):
            if key in interval:
                is_year = key == "years"
                interval[key] = [_range(item, is_year=is_year) for item in section.items(key)]
    return {"name": str(named.get("name", "")), "time_intervals": intervals}


def _range(value: object, *, is_year: bool) -> str:
    """Return a range of weekdays, days, months or years as text.

    YAML 1.1 reads a range such as 1:12 as the number 72; the range is restored from it.
    """
    if isinstance(value, int) and value >= _MINUTES and not is_year:
        return f"{value // _MINUTES}:{value % _MINUTES}"
    return str(value)

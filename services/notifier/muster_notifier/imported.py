"""Pure. An Alertmanager configuration file, as it is, becomes settings of ours.

Taken are its route, the receivers webhook, slack, pagerduty, email and msteams, inhibit_rules and
time_intervals. Everything else is named, and so is what will not be quite the same. Secrets stay
where they are: a setting says where in the file one is.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from muster import matchers
from muster_notifier import foreign, imported_receivers, labels

_GLOBAL: Final = {
    *("smtp_smarthost", "smtp_from", "smtp_require_tls", "smtp_auth_username"),
    *("smtp_auth_password", "smtp_auth_password_file", "slack_api_url", "slack_api_url_file"),
    "pagerduty_url",
}


class Importer:
    """Reads one file."""

    def __init__(self, file: str) -> None:
        self._read = foreign.Reader(file)
        self._receivers = imported_receivers.Receivers(self._read, {})

    @property
    def left_out(self) -> list[str]:
        """A line for everything that is not taken, or not quite the same."""
        return self._read.left_out

    def read(self, document: object) -> foreign.Tree:
        """Return our settings. Raises foreign.Unreadable."""
        top = self._read.mapping(document, "the file")
        if "route" not in top or "receivers" not in top:
            raise foreign.Unreadable("an Alertmanager configuration has `route` and `receivers`")
        general = self._read.mapping(top.get("global") or {}, "global")
        self._receivers = imported_receivers.Receivers(self._read, general)
        receivers: list[foreign.Tree] = []
        for index, item in enumerate(self._read.items(top.get("receivers"), "receivers")):
            receivers += self._receivers.receiver(
                self._read.mapping(item, f"receivers.{index}"), index
            )
        times = [
            *self._read.items(top.get("time_intervals"), "time_intervals"),
            *self._read.items(top.get("mute_time_intervals"), "mute_time_intervals"),
        ]
        root = self._route(self._read.mapping(top["route"], "route"), "route")
        found: foreign.Tree = {
            "default_receivers": root.pop("receivers", []),
            "group_by": root.pop("group_by", []),
            "routes": root.pop("routes", []),
            "receivers": receivers,
            "inhibit_rules": [
                self._inhibition(self._read.mapping(item, f"inhibit_rules.{index}"), index)
                for index, item in enumerate(
                    self._read.items(top.get("inhibit_rules"), "inhibit_rules")
                )
            ],
            "time_intervals": [self._time(item, index) for index, item in enumerate(times)],
        }
        for key in ("group_wait_s", "group_interval_s", "repeat_interval_s"):
            if key in root:
                found[key] = root[key]
        known = {"global", "route", "receivers", "inhibit_rules"}
        self._read.leave(top, "", known | {"time_intervals", "mute_time_intervals"})
        self._read.leave(general, "global", _GLOBAL)
        return found

    def _route(self, given: Mapping[str, object], path: str) -> foreign.Tree:  # noqa: C901  # key by key
        found: foreign.Tree = {}
        if "receiver" in given:
            name = str(given["receiver"])
            if name not in self._receivers.names:
                raise foreign.Unreadable(f"{path}.receiver: no receiver is called {name}")
            found["receivers"] = self._receivers.names[name]
        matchers = self._matchers(given, path, "matchers", "match", "match_re")
        if matchers:
            found["matchers"] = matchers
        if "continue" in given:
            found["continue"] = bool(given["continue"])
        if "group_by" in given:
            names = [str(name) for name in self._read.items(given["group_by"], f"{path}.group_by")]
            unknown = [name for name in names if name not in {*labels.NAMES, labels.ALL}]
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
            found["routes"] = [
                self._route(
                    self._read.mapping(item, f"{path}.routes.{index}"), f"{path}.routes.{index}"
                )
                for index, item in enumerate(below)
            ]
        known = {"receiver", "matchers", "match", "match_re", "continue", "group_by", "routes"}
        known |= {"group_wait", "group_interval", "repeat_interval"}
        self._read.leave(given, path, known | {"mute_time_intervals", "active_time_intervals"})
        return found

    def _inhibition(self, given: Mapping[str, object], index: int) -> foreign.Tree:
        path = f"inhibit_rules.{index}"
        found: foreign.Tree = {
            "source_matchers": self._matchers(
                given, path, "source_matchers", "source_match", "source_match_re"
            ),
            "target_matchers": self._matchers(
                given, path, "target_matchers", "target_match", "target_match_re"
            ),
            "equal": [str(name) for name in self._read.items(given.get("equal"), f"{path}.equal")],
        }
        for name in self._read.items(given.get("equal"), f"{path}.equal"):
            if name not in labels.NAMES:
                text = f"no alert of muster has a label {name}, so it is always equal"
                self._read.differ(f"{path}.equal", text)
        if "name" in given:
            found["name"] = str(given["name"])
        known = {"source_matchers", "source_match", "source_match_re", "equal", "name"}
        known |= {"target_matchers", "target_match", "target_match_re"}
        self._read.leave(given, path, known)
        return found

    def _matchers(
        self, given: Mapping[str, object], path: str, new: str, equal: str, regex: str
    ) -> list[str]:
        found = [str(text) for text in self._read.items(given.get(new), f"{path}.{new}")]
        for key, operator in ((equal, "="), (regex, "=~")):
            for name, value in self._read.mapping(given.get(key) or {}, f"{path}.{key}").items():
                shown = str(value).replace("\\", "\\\\").replace('"', '\\"')
                found.append(f'{name}{operator}"{shown}"')
        for name in _names(found):
            if name not in labels.NAMES:
                self._read.differ(f"{path}.{new}", f"no alert of muster has a label {name}")
        return found

    def _time(self, given: object, index: int) -> foreign.Tree:
        found = self._read.mapping(given, f"time_intervals.{index}")
        inner = self._read.items(found.get("time_intervals"), f"time_intervals.{index}")
        return {
            "name": str(found.get("name", "")),
            "time_intervals": [self._times(one, f"time_intervals.{index}") for one in inner],
        }

    def _times(self, given: object, path: str) -> foreign.Tree:
        """Return one interval: numbers may stand where we have texts."""
        found: foreign.Tree = dict(self._read.mapping(given, path))
        for key in ("weekdays", "days_of_month", "months", "years"):
            if key in found:
                found[key] = [str(one) for one in self._read.items(found[key], f"{path}.{key}")]
        return found


def _names(texts: Sequence[str]) -> list[str]:
    """Return the labels in matchers; what is no matcher is refused elsewhere, with its path."""
    try:
        return [one.name for one in matchers.parse_all(texts)]
    except ValueError:
        return []

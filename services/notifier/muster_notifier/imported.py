"""Pure: An Alertmanager configuration file, as it is, becomes settings of ours.

Taken are its route, the receivers webhook, slack, pagerduty, email and msteams, inhibit_rules and
time_intervals. Everything else is named, and so is what will not be quite the same. Secrets stay
where they are: a setting says where in the file one is.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from muster import matchers, silences
from muster_notifier import foreign, imported_receivers, labels

_MINUTES: Final = 60
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
        if root is None:
            raise foreign.Unreadable("route: the root has matchers that no alert of muster meets")
        rules = [
            self._inhibition(self._read.mapping(item, f"inhibit_rules.{index}"), index)
            for index, item in enumerate(
                self._read.items(top.get("inhibit_rules"), "inhibit_rules")
            )
        ]
        found: foreign.Tree = {
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

    def _route(self, given: Mapping[str, object], path: str) -> foreign.Tree | None:  # noqa: C901  # key by key
        found: foreign.Tree = {}
        if "receiver" in given:
            name = str(given["receiver"])
            if name not in self._receivers.names:
                raise foreign.Unreadable(f"{path}.receiver: no receiver is called {name}")
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

    def _inhibition(self, given: Mapping[str, object], index: int) -> foreign.Tree | None:
        path = f"inhibit_rules.{index}"
        known = {"source_matchers", "source_match", "source_match_re", "equal", "name"}
        known |= {"target_matchers", "target_match", "target_match_re"}
        self._read.leave(given, path, known)
        source, target = (
            self._matchers(given, path, f"{side}_matchers", f"{side}_match", f"{side}_match_re")
            for side in ("source", "target")
        )
        equal = [str(name) for name in self._read.items(given.get("equal"), f"{path}.equal")]
        here = [name for name in equal if name in labels.NAMES]
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
        found: foreign.Tree = {"source_matchers": source, "target_matchers": target, "equal": here}
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

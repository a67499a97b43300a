"""Pure: decides which XIDs make a GPU Unhealthy and what recovery requires, and names the rule.

`policies/xids.json` lists what each source states about each XID. A preset is a list of rules; the
first rule that names an XID decides. The user's file overrides the preset, XID by XID, and NVIDIA's
two lists, DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS, override both. `evaluation` reads the
files.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Final, TypeAlias

import msgspec

from muster import vocabulary
from muster_plugin.config import gpus
from muster_plugin.model import errors, gpu

CATALOGUE: Final = "policies/xids.json"
"""The path of the catalogue below the package's directory; the presets are beside it."""
DISABLE: Final = "DP_DISABLE_HEALTHCHECKS"
ENABLE: Final = "DP_ENABLE_HEALTHCHECKS"

_ALL: Final = frozenset({"all", "xids"})
_DIGITS_MAX: Final = 9
_LISTED_MAX: Final = 10

Xid = Annotated[int, msgspec.Meta(ge=1, le=999)]
Xids = Annotated[tuple[Xid, ...], msgspec.Meta(min_length=1, max_length=999)]


class Action(enum.StrEnum):
    """The effect of an XID on a GPU, which also decides what a recovery requires."""

    IGNORE = "ignore"
    DEGRADE = "degrade"
    UNHEALTHY = "unhealthy"
    RESET = "reset"
    """Unhealthy until there is evidence of a reset."""
    REBOOT = "reboot"
    """Unhealthy until the driver itself reports that nothing more is needed."""

    @property
    def is_unhealthy(self) -> bool:
        """Whether the XID makes the GPU Unhealthy."""
        return self.effect is gpu.Effect.UNHEALTHY

    @property
    def effect(self) -> gpu.Effect | None:
        """The effect on the GPU; None if there is none."""
        match self:
            case Action.IGNORE:
                return None
            case Action.DEGRADE:
                return gpu.Effect.DEGRADED
            case _:
                return gpu.Effect.UNHEALTHY


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule that applies to an XID: its action, name and source."""

    action: Action
    title: str
    rule: str
    source: str

    def __str__(self) -> str:
        """Return the rule as written in events."""
        return f"{self.rule}: {self.action} ({self.source})"


class Override(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's action for some XIDs, and the reason for it."""

    xids: Xids
    action: Action
    why: Annotated[str, msgspec.Meta(max_length=500)] = ""


class Overrides(errors.Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's policy file: rules that override those of the preset."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    rules: Annotated[tuple[Override, ...], msgspec.Meta(max_length=999)] = ()

    def problems(self) -> Iterator[str]:
        """Yield the problems of this section; each begins with the key of its setting."""
        first_rule: dict[int, int] = {}
        for at, rule in enumerate(self.rules):
            for repeated in sorted({xid for xid in rule.xids if rule.xids.count(xid) > 1}):
                yield f"rules[{at}].xids: {repeated} is listed twice"
            for xid in sorted(set(rule.xids)):
                if xid in first_rule:
                    yield f"rules[{at}].xids: {xid} is also in rules[{first_rule[xid]}]"
                first_rule.setdefault(xid, at)


class HealthCheckLists(msgspec.Struct, frozen=True, kw_only=True):
    """NVIDIA's two lists, parsed; the enabled list takes precedence.

    `is_off` is true if `all` is disabled, and neither `all` nor `xids` is enabled: then NVML's
    reports about the GPU itself do not make it Unhealthy either. The item `xids` concerns XIDs
    only.
    """

    disabled: frozenset[int] = frozenset()
    enabled: frozenset[int] = frozenset()
    disables_rest: bool = False
    enables_rest: bool = False
    is_off: bool = False
    problems: tuple[str, ...] = ()

    def enables(self, xid: int) -> bool:
        """Return whether the enabled list covers the XID."""
        return self.enables_rest or xid in self.enabled

    def disables(self, xid: int) -> bool:
        """Return whether the disabled list covers the XID, and the enabled list does not."""
        return not self.enables(xid) and (self.disables_rest or xid in self.disabled)


class CatalogueEntry(msgspec.Struct, frozen=True, array_like=True):
    """The statements of each source about one XID, in the column order of `xids.json`."""

    title: str
    nvidia: str
    then: str
    """The recovery step that NVIDIA recommends if the first step does not help."""
    nvsentinel: str
    gpud: str
    plugin: str
    dra: str


class Catalogue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The statements of each source about every XID, with each source's version and URL."""

    version: int
    sources: Mapping[str, str]
    where: Mapping[str, str]
    columns: tuple[str, ...]
    xids: Mapping[int, CatalogueEntry]


class _PresetRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: vocabulary.Name
    action: Action
    source: str
    xids: tuple[Xid, ...] = ()


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One preset: the first rule that names an XID decides; if none does, `otherwise` applies."""

    version: int
    preset: gpus.Preset
    says: str
    rules: tuple[_PresetRule, ...]
    otherwise: _PresetRule


_Decision: TypeAlias = tuple[Action, str, str]
"""An action, the name of its rule, and its source."""
_CATALOGUE: Final = msgspec.json.Decoder(Catalogue)
_PRESET: Final = msgspec.json.Decoder(Preset)


def preset_file(preset: gpus.Preset) -> str:
    """Return the path of a preset's file, relative to the package's directory."""
    return f"policies/{preset}.json"


def catalogue(text: bytes) -> Catalogue:
    """Decode the content of `xids.json`."""
    return _CATALOGUE.decode(text)


def preset(text: bytes) -> Preset:
    """Decode the content of a preset's file."""
    return _PRESET.decode(text)


class Policy:
    """The rule for every XID; `problems` name the items of NVIDIA's lists that are ignored."""

    def __init__(
        self,
        catalogue: Catalogue,
        preset: Preset,
        *,
        overrides: Overrides | None = None,
        disable: str = "",
        enable: str = "",
    ) -> None:
        self._catalogue = catalogue
        self._preset = preset
        self._lists = parse_lists(disable, enable)
        override_rules = overrides.rules if overrides else ()
        self._overrides = {xid: (at, r) for at, r in enumerate(override_rules) for xid in r.xids}
        self._rules: dict[int, _PresetRule] = {}
        for named in preset.rules:
            for xid in named.xids:
                self._rules.setdefault(xid, named)
        self.problems = self._lists.problems

    @property
    def is_off(self) -> bool:
        """Whether NVIDIA's lists prevent poll results from making a GPU Unhealthy."""
        return self._lists.is_off

    def rule(self, xid: int) -> Rule:
        """Return the rule for an XID.

        The policy file overrides the preset, and NVIDIA's lists override both, except that enabling
        an XID does not change a rule that already makes the GPU Unhealthy.
        """
        entry = self._catalogue.xids.get(xid)
        action, rule, source = self._override(xid) or self._by_preset(xid, entry)
        if self._lists.disables(xid):
            action, rule, source = Action.IGNORE, DISABLE, self._catalogue.sources["plugin"]
        elif self._lists.enables(xid) and not action.is_unhealthy:
            action, rule, source = self._severity(xid), ENABLE, self._catalogue.sources["plugin"]
        title = (entry.title if entry else "") or "unknown XID"
        return Rule(action=action, title=title, rule=rule, source=source)

    def _severity(self, xid: int) -> Action:
        """Return the action for an enabled XID that would otherwise not make the GPU Unhealthy."""
        for named in self._preset.rules:
            if xid in named.xids and named.action.is_unhealthy:
                return named.action
        return Action.UNHEALTHY

    def _override(self, xid: int) -> _Decision | None:
        at, rule = self._overrides.get(xid, (0, None))
        if rule is None:
            return None
        return rule.action, f"policy file rules[{at}]", rule.why or "no reason given"

    def _by_preset(self, xid: int, entry: CatalogueEntry | None) -> _Decision:
        rule = self._rules.get(xid) or self._preset.otherwise
        word = getattr(entry, rule.source) if entry else "unhealthy"
        return (
            rule.action,
            f"{self._preset.preset}/{rule.name} v{self._preset.version}",
            f"{self._catalogue.sources[rule.source]}: {word or 'no action'}",
        )


def warnings(gpus: gpus.Gpus | None) -> Iterator[str]:
    """Yield a warning, with its key, about each ignored item in NVIDIA's two lists."""
    if gpus is None:
        return
    keys = {DISABLE: "disable", ENABLE: "enable"}
    for problem in parse_lists(gpus.health.disable, gpus.health.enable).problems:
        variable, _, text = problem.partition(": ")
        yield f"gpus.health.{keys[variable]}: {text}"


def parse_lists(disable: str, enable: str) -> HealthCheckLists:
    """Parse NVIDIA's two lists (health.go, newHealthCheckXIDs).

    Items are separated by commas, in upper or lower case; `all` or `xids` anywhere stands for every
    XID. Anything else that is not an XID is ignored, as in NVIDIA's plugin, but reported.
    """
    off, disabled, unknown_disabled = _list(DISABLE, disable)
    on, enabled, unknown_enabled = _list(ENABLE, enable)
    return HealthCheckLists(
        disabled=disabled,
        enabled=enabled,
        disables_rest=bool(off),
        enables_rest=bool(on),
        is_off="all" in off and not on,
        problems=(*unknown_disabled, *unknown_enabled),
    )


def _list(variable: str, text: str) -> tuple[frozenset[str], frozenset[int], tuple[str, ...]]:
    words = [word.strip() for word in text.lower().split(",")]
    numbers = {int(word) for word in words if _is_number(word)} - {0}
    unknown = [w for w in words if w and w not in _ALL and not (_is_number(w) and int(w))]
    return _ALL & {*words}, frozenset(numbers), tuple(_unknown(variable, unknown))


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= _DIGITS_MAX


def _unknown(variable: str, words: Iterable[str]) -> Iterator[str]:
    for word in [*dict.fromkeys(words)][:_LISTED_MAX]:
        yield f"{variable}: {errors.quoted(word)} is not an XID; ignored"

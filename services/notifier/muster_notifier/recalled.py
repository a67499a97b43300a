"""Pure. What receivers know of groups that are not here: of before this process, or over since."""

from muster_notifier import decision
from muster_notifier import group as groups


class Recalled:
    """By receiver and group; see the module."""

    def __init__(self) -> None:
        self._told: dict[groups.Key, decision.Told] = {}
        self._by_alert: dict[str, set[groups.Key]] = {}

    def restore(self, key: groups.Key, told: decision.Told) -> None:
        """Take what the ledger says of a group, in which something fires."""
        self._told[key] = told
        for name in told.firing:
            self._by_alert.setdefault(name, set()).add(key)

    def put(self, key: groups.Key, told: decision.Told) -> None:
        """Take what is known of a group that is no longer needed."""
        self._told[key] = told

    def get(self, key: groups.Key) -> decision.Told | None:
        """Return what is known of a group."""
        return self._told.get(key)

    def drop(self, key: groups.Key) -> None:
        """Forget a group: it is here again, and knows it itself."""
        self._told.pop(key, None)

    def heard_of(self, fingerprint: str) -> list[groups.Key]:
        """Return the groups in which, by the ledger of the start, an alert fires."""
        return sorted(self._by_alert.get(fingerprint, ()))

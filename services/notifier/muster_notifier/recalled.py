"""Pure: What receivers know of groups that are not here: of before this process, or over since."""

from typing import Final

from muster_notifier import group as groups

_ENDED_MAX: Final = 20_000


class Recalled:
    """By receiver and group; see the module."""

    def __init__(self) -> None:
        self._told: dict[groups.Key, groups.Told] = {}
        self._by_alert: dict[str, set[groups.Key]] = {}
        self._ended: dict[groups.Key, str] = {}

    def restore(self, key: groups.Key, told: groups.Told) -> None:
        """Take what the ledger says of a group, in which something fires."""
        self._told[key] = told
        for name in told.firing:
            self._by_alert.setdefault(name, set()).add(key)

    def put(self, key: groups.Key, told: groups.Told) -> None:
        """Take what is known of a group that is no longer needed."""
        self._told[key] = told

    def end(self, key: groups.Key, heard: str) -> None:
        """Take the id of the last news of a group in which nothing fires any more.

        An alert that was another in the meantime may come back: that is news after that news.
        """
        self._ended.pop(key, None)
        self._ended[key] = heard
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def last_heard(self, key: groups.Key) -> str:
        """Return the id of the last news of a group, or empty."""
        told = self._told.get(key)
        return told.id if told else self._ended.get(key, "")

    def get(self, key: groups.Key) -> groups.Told | None:
        """Return what is known of a group."""
        return self._told.get(key)

    def drop(self, key: groups.Key) -> None:
        """Forget a group: it is here again, and knows it itself."""
        self._told.pop(key, None)
        self._ended.pop(key, None)

    def heard_of(self, fingerprint: str) -> list[groups.Key]:
        """Return the groups in which, by the ledger of the start, an alert fires."""
        return sorted(self._by_alert.get(fingerprint, ()))

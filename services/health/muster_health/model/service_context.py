"""Pure: What plugins and the fleet need to know of the service that watches them."""

from muster_health.model import config


class Around:
    """One for all. `leader` is the revision we lead under; None while another one does.

    `is_apart` is that our clock is apart from those of most nodes.
    """

    __slots__ = ("bounds", "has_cluster", "is_apart", "leader", "runbook_url", "settings")

    def __init__(
        self,
        settings: config.Detection,
        bounds: config.Bounds,
        *,
        runbook_url: str,
        has_cluster: bool,
        leader: int | None,
    ) -> None:
        self.settings, self.bounds = settings, bounds
        self.runbook_url, self.has_cluster = runbook_url, has_cluster
        self.is_apart = False
        self.leader = leader

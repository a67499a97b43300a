"""A fleet that exists only as health's `/state`, and a console that shows it."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from aiohttp import web

from muster.service import sections
from muster_console import config, server

GPU = "nvidia.com/gpu"
_POOLS = ("a100", "h100", "l4", "cpu")
_VERDICTS = {7: "STUCK", 101: "PLUGIN_DOWN", 211: "MAINTENANCE", 307: "DEGRADED"}


def plugin(node: str, verdict: str | None = "HEALTHY", **more: object) -> dict[str, Any]:
    """Return a plugin as health shows it."""
    since = datetime.now(UTC) - timedelta(minutes=12)
    return {
        "node": node,
        "plugin": "device-plugin",
        "state": "serving",
        "verdict": verdict,
        "since": since.isoformat(),
        "beat_age_s": 0.4,
        "interval_s": 1.0,
        "resources": [GPU],
        "devices": {GPU: 8},
        "allocatable": {GPU: 8 if verdict == "HEALTHY" else 3},
        **more,
    }


def alert(
    node: str, *, number: int = 0, severity: str = "critical", kind: str = "stuck", **more: object
) -> dict[str, Any]:
    """Return a firing alert as health shows it."""
    return {
        "fingerprint": f"{number:016x}",
        "node": node,
        "plugin": "device-plugin",
        "kind": kind,
        "severity": severity,
        "summary": f"the plugin on {node} answers nobody: no heartbeat for 12 s",
        "starts_at": (datetime.now(UTC) - timedelta(minutes=10)).isoformat(),
        "resource": GPU,
        "evidence": [{"source": "heartbeat", "observed": "none for 12.4 s, 12.4 intervals"}],
        "advice": "look at the plugin's process: it may be suspended",
        "runbook": "https://muster.dev/runbooks/stuck.md",
        **more,
    }


def large(count: int) -> list[dict[str, Any]]:
    """Return the plugins of a large fleet, a few of which have problems."""
    plugins = []
    for number in range(count):
        verdict = next((v for each, v in _VERDICTS.items() if number % (each * 5) == each), None)
        name = f"gpu-{_POOLS[number % 4]}-{number:05d}"
        alerts = []
        if verdict in {"STUCK", "PLUGIN_DOWN"}:
            severity = "critical" if number % 3 else "warning"
            alerts = [alert(name, number=number, severity=severity, kind=verdict.lower())]
        plugins.append(plugin(name, verdict or "HEALTHY", alerts=alerts))
    return plugins


class Health:
    """A stand-in for the health service; `plugins` and `fleet_alerts` are its state."""

    def __init__(self, plugins: Sequence[dict[str, Any]] = ()) -> None:
        self.plugins = list(plugins)
        self.fleet_alerts: list[dict[str, Any]] = []
        self.service: dict[str, Any] = {"leads": 3, "advisories": "received", "cluster": {}}
        self.groups: Sequence[str] = ()
        """Names for both the pools and the zones of the nodes, used in turn."""
        self.is_away = False

    async def state(self, request: web.Request) -> web.Response:
        """Answer with one node or one page of nodes."""
        if self.is_away:
            raise web.HTTPServiceUnavailable
        every = sorted(self.plugins, key=lambda each: str(each["node"]))
        following = ""
        if "node" in request.query:
            every = [each for each in every if each["node"] == request.query["node"]]
        else:
            after, count = request.query.get("after", ""), int(request.query.get("nodes", 10**9))
            every = [each for each in every if each["node"] > after]
            following = every[count - 1]["node"] if len(every) > count else ""
            every = every[:count]
        places = {
            each["node"]: {"pool": each["node"].split("-")[1], "zone": "eu-1" + "ab"[i % 2]}
            for i, each in enumerate(every)
            if each["node"].startswith("gpu-")
        }
        for i, each in enumerate(every):
            if self.groups:
                group = self.groups[i % len(self.groups)]
                places[each["node"]] = {"pool": group, "zone": group}
        body = {
            "plugins": every,
            "fleet": {"alerts": self.fleet_alerts, "storms": 0, "suspects": 0, "held": 0},
            "service": self.service,
            "next": following,
            "places": places,
        }
        return web.Response(body=orjson.dumps(body), content_type="application/json")


@contextlib.asynccontextmanager
async def answering(health: Health) -> AsyncIterator[str]:
    """Serve a stand-in for health; yield its address."""
    application = web.Application()
    application.router.add_get("/state", health.state)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def shown(
    health: Health,
    *,
    nats_url: str = "nats://127.0.0.1:1",
    pages_max: int = 100,
    port: int = 0,
    writing: config.Writing | None = None,
) -> AsyncIterator[str]:
    """Run a console in this process that reads from a stand-in for health; yield its address."""
    async with answering(health) as url:
        settings = config.Settings(
            health=(url,),
            pages_max=pages_max,
            writing=writing or config.Writing(),
            bus=sections.Bus(url=nats_url),
            http=sections.Http(port=port),
        )
        async with server.serving(settings) as address:
            yield address

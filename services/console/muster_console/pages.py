"""Adapter for HTTP: the pages, and the data of the fleet."""

import gzip
import hashlib
import traceback
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import jinja2
import prometheus_client
from starlette import requests, responses, routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from muster import vocabulary
from muster.fleet import model
from muster.service import logs, metrics, probes
from muster_console import (
    alert_groups,
    event_log,
    fleet_json,
    fleet_page,
    live,
    node_page,
    page_streams,
    plots,
    rendering,
    timeline,
)

_HERE: Final = Path(__file__).parent
_MEDIA: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_GZIP_MIN: Final = 1_000
_SHOWN_BYTES_MAX: Final = 32 * 1024
"""The number of characters of an event's JSON that are shown at first."""
_EVENTS_SHOWN: Final = 200
_TRACE_MAX: Final = 4_000
_DAY: Final = timedelta(days=1)
_TIME_MAX: Final = 4_102_444_800_000
"""The latest accepted time (the year 2100), in Unix milliseconds: `datetime` has a maximum."""


class Pages:
    """The HTTP routes of the pages and their data."""

    def __init__(self, current: live.Live, *, pages_max: int, grafana_url: str) -> None:
        self._live = current
        self._grafana_url = grafana_url
        self._streams = page_streams.Streams(current, pages_max=pages_max)
        self._templates = rendering.environment(jinja2.FileSystemLoader(_HERE / "templates"))
        self._files = {path.name: path.read_bytes() for path in (_HERE / "static").iterdir()}
        self._columns: tuple[int, bytes] = (-1, b"")

    def application(self, more: Sequence[routing.Route] = ()) -> Starlette:
        """Return the application with these routes and those in `more`."""
        route = routing.Route
        application = Starlette(
            routes=[
                route("/", self.fleet),
                route("/node/{name}", self.node),
                route("/alerts", self.alerts),
                route("/events", self.events),
                route("/plots", self.plots),
                route("/api/fleet", self.columns),
                route("/api/changes", self._streams.changes),
                route("/api/event", self.event),
                route("/static/{name}", self.static),
                *more,
                route("/healthz", _answered(probes.check(probes.always))),
                # always ready: a page itself reports which of its data is missing
                route("/readyz", _answered(probes.check(probes.always))),
                route("/metrics", _answered(_metrics)),
            ],
            exception_handlers={HTTPException: self.refuse, Exception: _failed},
        )
        # a redirect would contain the host and path as changed by a proxy before the console
        application.router.redirect_slashes = False
        return application

    async def fleet(self, request: requests.Request) -> responses.Response:
        """Answer with the page of the fleet, or only with the part beside the cells."""
        wanted = fleet_page.filter_of(request.query_params)
        view = fleet_page.page(
            self._live.fleet, self._live.history, self._live.log, wanted=wanted, at=_now()
        )
        is_part = request.query_params.get("part") == "side"
        name = "fleet_side.html" if is_part else "fleet.html"
        query = request.query_params.get("q", "")
        return self.page(request, name, view=view, wanted=wanted, query=query)

    async def node(self, request: requests.Request) -> responses.Response:
        """Answer with the page of one node."""
        name = request.path_params["name"]
        try:
            vocabulary.node_token(name)
        except ValueError as error:
            raise HTTPException(404, f"There is no such node: {error}.") from None
        summary = self._live.fleet.nodes.get(name)
        is_bad = summary is not None and summary.level is not model.Level.OK
        then = _time(request.query_params.get("at"))
        chosen = request.query_params.get("range", "")
        if chosen not in timeline.RANGES:
            began = then or (summary.since if summary and is_bad else None)
            chosen = timeline.fitting(began, _now())
        shown = timeline.RANGES[chosen]
        device = request.query_params.get("device", "")
        # at least a day of events is read, because the last inventory may be hours old
        revisions = self._revisions()
        is_part = then is not None and request.query_params.get("part") == "moment"
        sources = await self._live.sources(name, max(shown, _DAY), is_past=is_part)
        at = _now()
        view = node_page.page(
            name,
            sources,
            self._live.fleet,
            self._live.history,
            shown=shown,
            at=at,
            device=device,
            then=then,
        )
        return self.page(
            request,
            "node_moment.html" if is_part else "node.html",
            status=404 if view.unknown else 200,
            revisions=revisions,
            view=view,
            node_name=name,
            ranges=list(timeline.RANGES),
            range=chosen,
            chosen_device=device,
            grafana=grafana_link(self._grafana_url, name),
        )

    async def alerts(self, request: requests.Request) -> responses.Response:
        """Answer with the page of alerts."""
        wanted = alert_groups.filter_of(
            request.query_params.multi_items(), others={"done", "silence"}
        )
        at = _now()
        view = alert_groups.page(self._live.fleet, self._live.history, at=at, wanted=wanted)
        return self.page(
            request,
            "alerts.html",
            view=view,
            wanted=wanted,
            query=request.query_params.get("q", ""),
            done=alert_groups.done(request.query_params, self._live.fleet, at),
            limit=alert_groups.ALERTS_MAX,
            at=at,
        )

    async def events(self, request: requests.Request) -> responses.Response:
        """Answer with the newest events."""
        wanted = event_log.filter_of(request.query_params)
        return self.page(
            request,
            "events.html",
            wanted=wanted,
            entries=self._live.log.newest(wanted, most=_EVENTS_SHOWN),
            last=self._live.log.last,
            types=sorted(event.TYPE for event in vocabulary.EVENTS),
        )

    async def plots(self, request: requests.Request) -> responses.Response:
        """Answer with the page of plots."""
        ages = self._live.ages.of(self._live.fleet.nodes)
        usages, more = plots.resources(self._live.fleet.nodes.values())
        return self.page(
            request,
            "plots.html",
            days=plots.alerts_per_day(self._live.history.per_day(_now().date())),
            delays=plots.delays(self._live.delays.last_day(_now())),
            ages=plots.ages(ages),
            oldest=plots.oldest(ages),
            grafana=grafana_link(self._grafana_url),
            usages=usages,
            usages_more=more,
            is_cut=self._live.history.is_cut,
        )

    async def columns(self, request: requests.Request) -> responses.Response:
        """Answer with all nodes as columns."""
        revision = self._live.fleet.revision
        if self._columns[0] != revision:
            columns = fleet_json.columns(
                self._live.fleet.nodes.values(),
                revision=revision,
                instance=self._live.feed.instance,
            )
            packed = gzip.compress(fleet_json.encode(columns), compresslevel=4, mtime=0)
            self._columns = revision, packed
        body = self._columns[1]
        headers = {"vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        else:
            body = gzip.decompress(body)
        return responses.Response(body, media_type="application/json", headers=headers)

    async def event(self, request: requests.Request) -> responses.Response:
        """Answer with one event as readable JSON: its beginning or, on request, all of it."""
        entry = self._live.log.get(request.query_params.get("id", ""))
        if entry is None:
            text = "The console no longer has this event; `muster events` may still have it.\n"
            return responses.PlainTextResponse(text, 404)
        most = None if request.query_params.get("whole") else _SHOWN_BYTES_MAX
        text, length = event_log.pretty(entry.encoded, characters_max=most)
        headers = {"x-cut": str(length)} if length else {}
        return responses.PlainTextResponse(text, headers=headers)

    async def static(self, request: requests.Request) -> responses.Response:
        """Answer with a static file, such as a script."""
        name = request.path_params["name"]
        body = self._files.get(name)
        if body is None:
            raise HTTPException(404, "There is no such file.")
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return responses.Response(status_code=304, headers=headers)
        return _compressed(request, body, _MEDIA[Path(name).suffix], headers=headers)

    async def refuse(self, request: requests.Request, error: Exception) -> responses.Response:
        """Answer an HTTP error with an error page."""
        assert isinstance(error, HTTPException), "registered for these alone"
        is_known = error.status_code == 404  # noqa: PLR2004  # Not Found
        title = "Not found" if is_known else f"Error {error.status_code}"
        text = error.detail if error.detail != "Not Found" else "There is no such page."
        path, status = request.url.path, error.status_code
        return self.page(request, "error.html", status=status, title=title, text=text, path=path)

    def _revisions(self) -> dict[str, int]:
        """Return the current revisions of the data that a page shows."""
        self._live.feed.observe()
        return {"fleet": self._live.fleet.revision, "alerts": self._live.feed.alerts_revision}

    def page(
        self,
        request: requests.Request,
        name: str,
        *,
        status: int = 200,
        revisions: Mapping[str, int] | None = None,
        **content: object,
    ) -> responses.Response:
        """Answer with a page that is rendered from the template `name`."""
        page_name = name.split(".", maxsplit=1)[0].split("_", maxsplit=1)[0]
        # no updates on the page of a form: they would replace what a person has entered
        scripts = {"fleet": "fleet.js", "events": "events.js", "silence": "", "error": ""}
        depth = request.url.path.count("/") - 1
        text = self._templates.get_template(name).render(
            root="../" * depth,
            page_name=page_name,
            script=scripts.get(page_name, "page.js"),
            state=self._live.feed.state(self._live.now(), _now()),
            shown=revisions or self._revisions(),
            history_loaded=self._live.history.is_loaded,
            visitor=request.scope.get("muster.visitor"),
            **content,
        )
        return _compressed(request, text.encode("utf-8", "replace"), "text/html", status=status)


def grafana_link(template: str, node: str = "$__all") -> str:
    """Return the link into Grafana for a node, or for all nodes."""
    return template.replace("{node}", urllib.parse.quote(node, safe="$"))


def _failed(request: requests.Request, error: Exception) -> responses.Response:
    """Log an unexpected exception, and answer with status 500."""
    trace = "".join(traceback.format_exception(error))[-_TRACE_MAX:]
    logs.logger().error("request_failed", path=request.url.path, trace=trace)
    return responses.PlainTextResponse("The console has a bug; its log says where.\n", 500)


def _compressed(
    request: requests.Request,
    body: bytes,
    media_type: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> responses.Response:
    more = {"vary": "accept-encoding", **(headers or {})}
    if len(body) >= _GZIP_MIN and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, compresslevel=4, mtime=0)
        more["content-encoding"] = "gzip"
    return responses.Response(body, status, media_type=media_type, headers=more)


def _time(milliseconds: str | None) -> datetime | None:
    """Return the time in an address, in Unix milliseconds; None if it is missing or invalid."""
    number = page_streams.number(milliseconds)
    return None if number is None else datetime.fromtimestamp(min(number, _TIME_MAX) / 1e3, UTC)


def _now() -> datetime:
    return datetime.now(UTC)


def _answered(route: probes.Route) -> Callable[[requests.Request], responses.Response]:
    """Return an HTTP endpoint that answers with the result of `route`."""

    def answer(_: requests.Request) -> responses.Response:
        status, media_type, body = route()
        return responses.Response(body, status, media_type=media_type)

    return answer


def _metrics() -> probes.Answer:
    return (200, *metrics.exported(prometheus_client.REGISTRY))

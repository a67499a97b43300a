"""Adapter for `muster console`: serves the pages on this machine and opens them in a browser."""

import asyncio
import os
import sys
import webbrowser
from typing import Annotated, Final

import cyclopts
import msgspec
from cyclopts import Parameter

from muster import client
from muster.cli import health as health_command
from muster.cli import output
from muster.cli.events import Url
from muster.service import logs, runtime
from muster_console import config, server

_PORT: Final = 8630

app = cyclopts.App(name="console")

Port = Annotated[
    int | None,
    Parameter(help=f"The port on this machine; by default {_PORT}, or a free one if it is taken."),
]


@app.default
def show_console(
    *,
    port: Port = None,
    browser: bool = True,
    health: health_command.Health = None,
    url: Url = None,
) -> int:
    """Show the fleet in a browser, until Ctrl-C.

    The pages are served on this machine only. By default they show the newest `muster up` of this
    machine; with `--context`, they show a cluster.

    Parameters
    ----------
    browser
        Open the browser.

    """
    try:
        settings = _settings(port or 0, health, url)
        asyncio.run(_serve(settings, is_any_port=port is None, opens=browser))
    except (ConnectionError, runtime.CannotStart) as error:
        return output.fail("console", str(error), code=1)
    except (ValueError, msgspec.ValidationError) as error:
        return output.fail("console", str(error))
    return 0


def _settings(port: int, addresses: str | None, nats_url: str | None) -> config.Settings:
    """Return the settings. Raises ValueError, and ConnectionError if no health service is found."""
    named, here = health_command.addresses(addresses)
    bus = nats_url or here or client.DEFAULT_URL
    # the local user may act only on the `muster up` of this machine
    tree = {
        "health": named,
        "bus": {"url": bus},
        "http": {"port": port},
        "writing": {"local": here is not None and nats_url is None},
    }
    return msgspec.convert(tree, config.Settings)


async def _serve(settings: config.Settings, *, is_any_port: bool, opens: bool) -> None:
    logs.configure("console", level="warning")
    if is_any_port:
        preferred = msgspec.structs.replace(settings.http, port=_PORT)
        try:
            await _serve_at(msgspec.structs.replace(settings, http=preferred), opens=opens)
        except runtime.CannotStart:
            pass  # the usual port is taken
        else:
            return
    await _serve_at(settings, opens=opens)


async def _serve_at(settings: config.Settings, *, opens: bool) -> None:
    async def work() -> None:
        async with server.serving(settings) as address:
            output.show(f"console  {address}", f"health   {', '.join(settings.health)}")
            if opens and _has_browser():
                await asyncio.to_thread(webbrowser.open, address)
            await asyncio.Event().wait()

    await runtime.run(work())


def _has_browser() -> bool:
    """Return whether the output is a terminal, on a machine where a graphical browser can open."""
    has_window = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    return has_window and sys.stdout.isatty()

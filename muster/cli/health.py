"""Adapter: health: where it is, and what it knows of the fleet."""

import contextlib
import http.client
import os
import re
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Final

from muster.cli import status

_ANSWER_S: Final = 5.0
_STATE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Of a fleet of 100,000 nodes, several times over."""
_NO_HEALTH: Final = (
    "no health service runs on this machine as part of `muster up`; say where one is with --health "
    "or MUSTER_HEALTH_URL (in a cluster: kubectl -n muster port-forward deploy/muster-health 8080)"
)


def ask(given: str | None) -> tuple[str, str | None, status.State]:
    """Return where health is, where NATS is beside it if that is known, and what health knows.

    Raises ConnectionError when nobody answers, ValueError for what is no address.
    """
    places: list[tuple[str, str | None]] = [(_address(given), None)] if given else _running_here()
    problem = _NO_HEALTH
    for url, beside in places:
        try:
            return url, beside, status.decode(_read(f"{url}/state"))
        except ConnectionError as error:
            problem = f"health does not answer: {error}"
        except ValueError as error:
            problem = f"{url}/state is not what this version can read: {error}"
    raise ConnectionError(problem)


def _address(given: str) -> str:
    """Return the address of a health service. Raises ValueError for what is none."""
    address = given.rstrip("/").removesuffix("/state")
    try:
        parts = urllib.parse.urlsplit(address)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not re.fullmatch(r"[!-~]+", address):
        raise ValueError(f"{given!r} is no address of health, such as http://127.0.0.1:8080")
    return address


def _running_here() -> list[tuple[str, str | None]]:
    """Return where health and NATS are of each `muster up` of ours, the newest first."""
    import orjson  # noqa: PLC0415  # only who does not say where it is pays for it
    import yaml  # noqa: PLC0415  # as above

    found = []
    for log in Path(tempfile.gettempdir()).glob("muster-*/health.log"):
        # one that ends meanwhile takes its files with it; others' directories are not for us
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            if log.stat().st_uid != os.getuid():
                continue
            with log.open("rb") as told:
                said = next((line for line in told if b'"event":"listening"' in line), b"")
            # written once, at the start
            file = log.with_name("health.yaml")
            place = (
                str(orjson.loads(said)["http"]),
                str(yaml.safe_load(file.read_text("utf-8"))["bus"]["url"]),
            )
            found.append((file.stat().st_mtime, place))
    return [place for _, place in sorted(found, reverse=True)]


def _read(url: str) -> bytes:
    """Return what is there. Raises ConnectionError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=_ANSWER_S) as answer:
            body: bytes = answer.read(_STATE_BYTES_MAX)
            return body
    except urllib.request.HTTPError as error:
        error.close()
        raise ConnectionError(f"{url}: HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"{url}: {getattr(reason, 'strerror', None) or reason}") from None

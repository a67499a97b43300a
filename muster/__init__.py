"""The common package of muster, the Kubernetes device plugin suite that never fails silently.

Five lines of Python follow all events of a fleet:

    import asyncio, muster
    async def main():
        async for event in muster.events("device.*", node="*"):
            print(event)
    asyncio.run(main())
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.client import events
    from muster.codec import CloudEvent, MalformedEvent

__version__ = "0.1.0"
__all__ = ["RUNBOOKS_URL", "CloudEvent", "MalformedEvent", "__version__", "events"]

RUNBOOKS_URL = f"https://muster.dev/v{__version__}/docs/runbooks/"
"""The base URL of this version's runbooks (docs/runbooks), which alerts link to. To publish them
elsewhere, change this line and run scripts/generate.py and manifests.py.
"""


def __getattr__(name: str) -> object:
    """Import an SDK name on first use, so that a plugin can register before it loads NATS."""
    if name in {"CloudEvent", "MalformedEvent"}:
        from muster import codec  # noqa: PLC0415  # the point of this function

        return getattr(codec, name)
    if name == "events":
        from muster import client  # noqa: PLC0415  # the point of this function

        return client.events
    raise AttributeError(f"module 'muster' has no attribute {name!r}")

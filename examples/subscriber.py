"""Print every alert, and then its changes: `python examples/subscriber.py`; needs only nats-py.

schemas/asyncapi.json describes the subject, schemas/alert.changed.json the data. The newest state
of each alert comes first, because the stream keeps it; then come changes as they happen.
"""

import asyncio
import json
import os

import nats
from nats.js.api import DeliverPolicy


async def main() -> None:
    """Follow alerts until Ctrl-C."""
    connection = await nats.connect(
        os.environ.get("NATS_URL", "nats://127.0.0.1:4222"),
        user_credentials=os.environ.get("NATS_CREDS"),
    )
    alerts = await connection.jetstream().subscribe(
        "muster.alert.>", ordered_consumer=True, deliver_policy=DeliverPolicy.LAST_PER_SUBJECT
    )
    async for message in alerts.messages:
        alert = json.loads(message.data)["data"]
        # as JSON, because a name may contain characters that a terminal obeys
        summary = json.dumps(alert["summary"])
        print(alert["state"], alert["severity"], alert["kind"], alert["node"], summary, flush=True)


asyncio.run(main())

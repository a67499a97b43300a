"""Print every alert, and then its changes: `python examples/subscriber.py`; needs only nats-py.

schemas/asyncapi.json describes the subject, schemas/alert.changed.json the data. The newest state
of each alert comes first, because the stream keeps it; then come changes as they happen.

As the reader NAME (`muster auth reader --name NAME --out FILE`), set `NATS_CREDS=FILE`,
`NATS_DOMAIN=muster` and `NATS_INBOX_PREFIX=_INBOX.reader_NAME`.
"""

import asyncio
import json
import os

import nats
from nats.js.api import AckPolicy, DeliverPolicy


async def main() -> None:
    """Follow alerts until Ctrl-C."""
    connection = await nats.connect(
        os.environ.get("NATS_URL", "nats://127.0.0.1:4222"),
        user_credentials=os.environ.get("NATS_CREDS"),
        inbox_prefix=os.environ.get("NATS_INBOX_PREFIX", "_INBOX"),
    )
    jetstream = connection.jetstream(domain=os.environ.get("NATS_DOMAIN"))
    # a reader may only pull messages, through a consumer that the server names
    consumer = await jetstream.add_consumer(
        "MUSTER_ALERTS",
        filter_subject="muster.alert.>",
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
    )
    alerts = await jetstream.pull_subscribe_bind(consumer.name, "MUSTER_ALERTS")
    while True:
        try:
            messages = await alerts.fetch(100, timeout=5)
        except TimeoutError:
            continue
        for message in messages:
            alert = json.loads(message.data)["data"]
            # as JSON, because a summary may contain characters that a terminal obeys
            summary = json.dumps(alert["summary"])
            print(
                alert["state"], alert["severity"], alert["kind"], alert["node"], summary, flush=True
            )


asyncio.run(main())

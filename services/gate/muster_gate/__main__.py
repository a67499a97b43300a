"""Adapter: everything: questions of nats-server in, answers out; the cluster's keys kept fresh.

Every replica answers, each question once: they are one queue group. Whoever is connected stays so
when all are gone; who comes then is refused by nats-server, and comes again.
"""

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Final

import nats.aio.client
import prometheus_client

from muster.nats import connection
from muster.nats.auth import accounts
from muster.service import entry, logs, probes, runtime
from muster_gate import callout, cluster_keys, config
from muster_gate.tokens import Reason

_GROUP: Final = "muster-gate"
_AGAIN_S: Final = 5.0
"""So often at most are the keys fetched because somebody shows a token of an unknown one."""
_WAITING_MAX: Final = 1_000
_TOLD_EACH_S: Final = 10.0
_QUESTIONS_MAX: Final = 20_000
_LATE_S: Final = 1.5
"""A client waits for 2 s and then comes again: an answer after that is work for nobody, and keeps
the next ones waiting as long."""


ANSWERS: Final = prometheus_client.Counter(
    "muster_gate_answers_total", "Who asked to come in: admitted, or why not.", ["outcome"]
)
DECIDING: Final = prometheus_client.Histogram(
    "muster_gate_decision_seconds",
    "What one answer takes.",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)
KEYS: Final = prometheus_client.Gauge("muster_gate_keys", "Public keys of the cluster at hand.")
HEARD: Final = prometheus_client.Gauge(
    "muster_gate_keys_heard_timestamp_seconds", "When the keys were last as the cluster has them."
)
SIGNING: Final = prometheus_client.Gauge(
    "muster_gate_signing_usable", "0 while gate.json is not as it should be: the old one is used."
)
FETCHES: Final = prometheus_client.Counter(
    "muster_gate_key_fetches_total", "Looks for the cluster's keys, by outcome.", ["outcome"]
)


class Gate:
    """Answers questions, and looks for keys."""

    def __init__(self, settings: config.Settings, keeper: callout.Doorkeeper, api: str) -> None:
        self._settings = settings
        self._keeper = keeper
        self._api = api
        self._away = ""
        self._unusable = False
        SIGNING.set(1)
        self._fetched_at = float("-inf")
        self._fetching = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()
        self._client: nats.aio.client.Client | None = None
        self._told: dict[Reason, tuple[float, int]] = {}
        self._questions: asyncio.Queue[tuple[float, connection.Message]] = asyncio.Queue(
            _QUESTIONS_MAX
        )

    def problem(self) -> str | None:
        """Say why nobody can be let in, if so."""
        ring = self._keeper.ring
        if ring is None or time.time() - ring.heard_at > self._settings.keys.age_max_s:
            return f"no keys: {self._away or 'not looked yet'}"
        return None

    async def listen(self, client: nats.aio.client.Client) -> None:
        """Take questions on a newly connected client; nats-py keeps this when it reconnects."""
        if client is self._client:
            return
        await client.subscribe(
            accounts.CALLOUT, queue=_GROUP, cb=self.take, pending_msgs_limit=_QUESTIONS_MAX
        )
        self._client = client

    async def take(self, question: connection.Message) -> None:
        """Keep a question until its turn; of too many the newest are nobody's."""
        try:
            self._questions.put_nowait((asyncio.get_running_loop().time(), question))
        except asyncio.QueueFull:
            ANSWERS.labels(Reason.LATE.value).inc()

    async def answer(self) -> None:
        """Answer questions; one with a key unknown to us waits until keys were looked for."""
        clock = asyncio.get_running_loop().time
        while True:
            since, question = await self._questions.get()
            if clock() - since > _LATE_S:
                ANSWERS.labels(Reason.LATE.value).inc()
                continue
            found = self._decide(question.data)
            is_new = isinstance(found, callout.Turned) and found.reason is Reason.UNKNOWN_KEY
            if is_new and self._may_fetch() and len(self._waiting) < _WAITING_MAX:
                task = asyncio.create_task(self._answer_later(question))
                self._waiting.add(task)
                task.add_done_callback(self._waiting.discard)
            else:
                await self._say(question, found)
            # questions come and answers go in between
            await asyncio.sleep(0)

    async def keep_fresh(self) -> None:
        """Look for keys, the cluster's and our own, again and again."""
        while True:
            await self.fetch()
            await asyncio.sleep(self._settings.keys.refresh_s)
            self._read_signing()

    async def fetch(self) -> None:
        """Look for the cluster's keys now."""
        async with self._fetching:
            self._fetched_at = asyncio.get_running_loop().time()
            issuer = self._settings.tokens.issuer
            try:
                self._keeper.ring = ring = await cluster_keys.fetch(
                    self._settings.keys, issuer=issuer, api=self._api, at=time.time()
                )
            except cluster_keys.Away as error:
                FETCHES.labels("failed").inc()
                if not self._away:
                    logs.logger().warning("keys_away", error=str(error))
                self._away = str(error)
                return
        FETCHES.labels("fetched").inc()
        KEYS.set(sum(map(len, ring.keys.values())))
        HEARD.set(ring.heard_at)
        if self._away:
            logs.logger().info("keys_back", keys=len(ring.keys))
        self._away = ""

    async def close(self) -> None:
        """Drop what waits for keys."""
        waiting = list(self._waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _may_fetch(self) -> bool:
        again_s = min(_AGAIN_S, self._settings.keys.refresh_s)
        is_due = asyncio.get_running_loop().time() - self._fetched_at >= again_s
        return is_due or self._fetching.locked()

    async def _answer_later(self, question: connection.Message) -> None:
        if self._fetching.locked():
            async with self._fetching:
                pass
        else:
            await self.fetch()
        await self._say(question, self._decide(question.data))

    def _decide(self, payload: bytes) -> callout.Admitted | callout.Turned:
        clock = asyncio.get_running_loop().time
        try:
            with DECIDING.time():
                return self._keeper.decide(payload, at=time.time(), now=clock())
        except Exception as error:  # noqa: BLE001  # strangers write this: one must not end us all
            logs.logger().error("question_failed", kind=type(error).__name__)
            return callout.Turned(answer=b"", reason=Reason.UNREADABLE)

    async def _say(
        self, question: connection.Message, found: callout.Admitted | callout.Turned
    ) -> None:
        if isinstance(found, callout.Admitted):
            ANSWERS.labels("admitted").inc()
            logs.logger().debug(
                "admitted", node=found.node, pod=found.pod, lifetime_s=round(found.lifetime_s)
            )
        else:
            ANSWERS.labels(found.reason.value).inc()
            self._tell(found)
        if found.answer and question.reply:
            with contextlib.suppress(*connection.LOST):
                await question.respond(found.answer)

    def _tell(self, turned: callout.Turned) -> None:
        """Log a refusal; of more for the same reason in a short time only how many."""
        now = asyncio.get_running_loop().time()
        next_at, untold = self._told.get(turned.reason, (now, 0))
        if now < next_at:
            self._told[turned.reason] = (next_at, untold + 1)
            return
        self._told[turned.reason] = (now + _TOLD_EACH_S, 0)
        logs.logger().warning(
            "refused",
            reason=turned.reason,
            connection=turned.name,
            host=turned.host,
            subject=turned.subject,
            more_before=untold,
        )

    def _read_signing(self) -> None:
        try:
            self._keeper.signing = read_signing(self._settings.signing)
        except entry.CannotStart as error:
            if not self._unusable:
                logs.logger().error("signing_unusable", error=str(error))
            self._unusable = True
        else:
            if self._unusable:
                logs.logger().info("signing_usable")
            self._unusable = False
        SIGNING.set(not self._unusable)


def read_signing(file: str) -> callout.Signing:
    """Return what answers are signed with. Raises CannotStart."""
    try:
        return callout.signing(Path(file).read_bytes())
    except OSError as error:
        raise entry.CannotStart(f"signing: {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise entry.CannotStart(f"signing: {file}: {error}") from None


async def serve(settings: config.Settings) -> None:
    """Serve until SIGTERM."""
    logs.configure("gate", level=settings.log.level)
    api = cluster_keys.find_api(settings.keys.api)
    if settings.keys.file is None and not api:
        raise entry.CannotStart("keys: this is no pod of a cluster; say keys.file or keys.api")
    keeper = callout.Doorkeeper(settings, read_signing(settings.signing))
    keeper.ring = cluster_keys.kept(settings.keys, issuer=settings.tokens.issuer)
    if keeper.ring is not None:
        HEARD.set(keeper.ring.heard_at)
    gate = Gate(settings, keeper, api)
    async with contextlib.AsyncExitStack() as stack:
        link = await stack.enter_async_context(
            connection.Connection(settings.bus.url, name="muster-gate", prepare=gate.listen)
        )
        stack.push_async_callback(gate.close)
        address = await stack.enter_async_context(
            probes.serve(
                settings.http.host,
                settings.http.port,
                ready=lambda: gate.problem() if link.is_connected else "not connected to NATS",
            )
        )

        async def work() -> None:
            # only now SIGTERM is heard
            logs.logger().info("listening", http=address)
            await gate.keep_fresh()

        await runtime.run(work(), gate.answer())


def main() -> int:
    """Run the gate; return the exit code."""
    return entry.main("gate", config.Settings, serve)


if __name__ == "__main__":
    sys.exit(main())

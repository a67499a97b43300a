"""Adapter for threads and the environment: connects a command to the cluster named by `--context`.

While the command runs, a port-forward is open to each pod that it needs. The command itself needs
no changes: it reads addresses and credentials from environment variables of this process.
"""

import asyncio
import concurrent.futures
import contextlib
import enum
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from muster import commands
from muster.cli import output
from muster.kubernetes import installation

if TYPE_CHECKING:
    from muster.cli import cluster as clusters

NAMESPACE: Final = "muster"

_OPEN_S: Final = 30.0
_CLOSE_S: Final = 5.0
_HEALTH_MAX: Final = 3
"""The maximum number of health pods to connect to; only one of them leads."""
_VARIABLES: Final = (
    "MUSTER_HEALTH_URL",
    "NATS_URL",
    "NATS_CREDS",
    "NATS_CA",
    "NATS_SERVER_NAME",
    "NATS_TOKEN_FILE",
    "NATS_INBOX_PREFIX",
)


class Need(enum.Flag):
    """A service that a command needs in a cluster."""

    HEALTH = enum.auto()
    EVENTS = enum.auto()
    WHOLE_BUS = enum.auto()
    SILENCES = enum.auto()
    """The bus as for EVENTS, but the command also works without it."""


NEEDS: Final[Mapping[str, Need]] = {
    "console": Need.HEALTH | Need.EVENTS,
    "dlq": Need.WHOLE_BUS,
    "events": Need.EVENTS,
    "silence": Need.WHOLE_BUS,
    "status": Need.HEALTH | Need.SILENCES,
    "top": Need.HEALTH | Need.EVENTS,
    "why": Need.HEALTH | Need.EVENTS,
}
"""By command: the services it needs, if `muster` itself handles the option `--context`."""
_BUS: Final = Need.EVENTS | Need.WHOLE_BUS | Need.SILENCES
_REPLACED: Final = {"--health": Need.HEALTH, "--url": _BUS}
"""By option with an address: the services that need no connection if the option is set."""


def run(
    command: str,
    tokens: Sequence[str],
    *,
    context: str,
    namespace: str,
    call: Callable[[Sequence[str]], int],
) -> int:
    """Call a command that reaches a cluster; return its exit code."""
    needs = NEEDS[command]
    for option, replaced in _REPLACED.items():
        if any(token.split("=")[0] == option for token in tokens):
            needs &= ~replaced
    if not needs:
        return output.fail(command, "--context: cannot be used if all addresses are set")
    return run_with(command, needs, lambda: call(tokens), context=context, namespace=namespace)


def run_with(
    command: str, needs: Need, call: Callable[[], int], *, context: str, namespace: str
) -> int:
    """Run `call` with connections to these services in a cluster; return its exit code."""
    problem = commands.missing("labeler")
    if problem:
        return output.fail(command, problem, code=1)
    try:
        with reached(command, needs, context=context, namespace=namespace):
            return call()
    except installation.Unreachable as error:
        return output.fail(command, str(error), code=1)


@contextlib.contextmanager
def reached(command: str, needs: Need, *, context: str, namespace: str) -> Iterator[None]:
    """Set the environment so that a command reaches a cluster, until the block ends.

    A thread forwards connections, because commands have their own event loops. Raises Unreachable.
    """
    with restored() as kept:
        thread = _Thread(_Opening(command, needs, context, namespace, kept.get("NATS_CREDS")))
        try:
            os.environ.update(thread.start())
            yield
        finally:
            thread.end()


@contextlib.contextmanager
def restored() -> Iterator[Mapping[str, str]]:
    """Unset the variables with addresses and credentials until the block ends; yield them."""
    kept = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
    try:
        yield kept
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(kept)


async def open_health(
    cluster: "clusters.Cluster", stack: contextlib.AsyncExitStack
) -> Mapping[str, str]:
    """Connect to health until the stack closes; return its environment variable.

    Raises Unreachable.
    """
    pods = (await cluster.ready(installation.HEALTH))[:_HEALTH_MAX]
    forwarded = [cluster.forwarded(pod, installation.HTTP_PORT) for pod in pods]
    places = [await stack.enter_async_context(each) for each in forwarded]
    return {"MUSTER_HEALTH_URL": ",".join(f"http://{place}" for place in places)}


async def open_bus(
    cluster: "clusters.Cluster",
    stack: contextlib.AsyncExitStack,
    *,
    role: installation.Role,
    own: str | None,
) -> tuple[Mapping[str, str], str]:
    """Connect to NATS until the stack closes; return the environment variables and the rights.

    `own` is the user's own credentials file. Raises Unreachable.
    """
    server = (await cluster.ready(installation.NATS))[0]
    login = installation.login(server, role)
    place = await stack.enter_async_context(cluster.forwarded(server, installation.NATS_PORT))
    variables = await cluster.credentials(login, place, own=own)
    is_own = own is not None and variables.get("NATS_CREDS") == own
    source = f"$NATS_CREDS ({own})" if is_own else f"Secret {login.secret.name}"
    return variables, f"NATS as {role} with {source}"


class _Thread:
    """A thread that forwards local ports to pods of the cluster, in its own event loop."""

    def __init__(self, opening: "_Opening") -> None:
        self._opening = opening
        self._variables: concurrent.futures.Future[Mapping[str, str]] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="port-forward", daemon=True)

    def start(self) -> Mapping[str, str]:
        """Open all connections; return the environment variables. Raises Unreachable."""
        self._thread.start()
        return self._variables.result()

    def end(self) -> None:
        """Close all connections."""
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(_OPEN_S):
                    variables = await self._opening.open(stack)
                self._variables.set_result(variables)
                await asyncio.Event().wait()
        except TimeoutError:
            self._fail(installation.Unreachable(f"the cluster has not answered for {_OPEN_S:g} s"))
        except Exception as error:  # noqa: BLE001  # raised again by `start`, in the caller's thread
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._variables.done():
            self._variables.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Opening:
    """The connections to open for a command; `creds` is the user's own credentials file."""

    command: str
    needs: Need
    context: str
    namespace: str
    creds: str | None

    async def open(self, stack: contextlib.AsyncExitStack) -> Mapping[str, str]:
        """Open all connections until the stack closes; return the variables, print the rights."""
        from muster.cli import cluster as clusters  # noqa: PLC0415  # the client, only where it is used

        cluster = await stack.enter_async_context(
            clusters.opened(context=self.context, namespace=self.namespace)
        )
        rights = [await cluster.rights(self.context)]
        variables: dict[str, str] = {}
        if Need.HEALTH in self.needs:
            variables |= await open_health(cluster, stack)
        if self.needs & _BUS:
            is_whole = Need.WHOLE_BUS in self.needs
            role = installation.Role.ADMIN if is_whole else installation.Role.READER
            try:
                more, whose = await open_bus(cluster, stack, role=role, own=self.creds)
            except installation.Unreachable as error:
                if Need.SILENCES not in self.needs:
                    raise
                more, whose = {}, f"which alerts are silenced is unknown: {error}"
            variables |= more
            rights.append(whose)
        output.warn(self.command, "; ".join(rights))
        return variables

"""Settings of every test: what one run finds on a machine that is busy, another run finds too."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# A test starts processes while gRPC runs here: its handlers of fork() write to the child's stderr,
# or wake its pollers, before the child becomes another program.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Nothing here trusts the authorities of this machine, whose file takes 25 ms to read: in every
# process that imports aiohttp, and for every client of Kubernetes.
os.environ["SSL_CERT_FILE"] = os.devnull

# A shell starts background jobs with SIGINT ignored, and so would be every program started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


# what the collection of the tests makes is no garbage: looking for some takes a tenth of its time
gc.disable()


def pytest_collection_finish() -> None:
    """Never collect the modules of the tests: it would take 0.2 s again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _logs_of_its_own() -> Iterator[None]:
    """Leave no logging behind: who captured logs once would log to stdout for good."""
    yield
    structlog.reset_defaults()

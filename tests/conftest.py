"""Settings for all tests: environment, signals, Hypothesis profiles and garbage collection."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# Tests start processes while gRPC runs in this process. gRPC's handlers of fork() would write to
# the child's stderr, or wake its pollers, before the child calls exec().
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# No test trusts this machine's certificate authorities. Reading their file takes 25 ms, in every
# process that imports aiohttp and for every Kubernetes client.
os.environ["SSL_CERT_FILE"] = os.devnull

# A shell starts background jobs with SIGINT ignored; programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


# collecting the tests creates no garbage; searching for some would take a tenth of the time
gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the test modules from garbage collection, which would take 0.2 s each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _logs_of_its_own() -> Iterator[None]:
    """Reset structlog after each test, so that no test inherits another's log configuration."""
    yield
    structlog.reset_defaults()

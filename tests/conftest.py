"""Settings of every test: what one run finds on a machine that is busy, another run finds too."""

import os

from hypothesis import settings

# A test starts processes while gRPC runs here: its handlers of fork() write to the child's stderr,
# or wake its pollers, before the child becomes another program.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

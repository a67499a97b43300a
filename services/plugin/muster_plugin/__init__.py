"""Adapter: the plugin's packages. Speaks the kubelet's API on one node, and reports to the bus.

The heavy packages are loaded here because this runs before every module of the room: whoever
imports structlog first decides what it drags in.
"""

from google.protobuf.internal import api_implementation

from muster import lean

lean.begin()
# of use where there are GPUs
for _seldom in (
    "gpu.health_state",
    "gpu.replicas",
    "gpu.nvml.observer",
    "gpu.policy_files",
    "gpu.simulated",
):
    lean.later(f"muster_plugin.{_seldom}")
lean.load("grpc.aio", hollow=["typing_extensions"])
if api_implementation.Type() != "python":
    lean.load(
        "google.protobuf.internal.builder", hollow=["google.protobuf.internal.python_message"]
    )
lean.load("muster.service.entry")
lean.load("muster.vocabulary")

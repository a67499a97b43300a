"""Door to the plugin's packages. Speaks the kubelet's API on one node, and reports to the bus.

The heavy packages are loaded here because this runs before every module of the room: whoever
imports structlog first decides what it drags in.
"""

from google.protobuf.internal import api_implementation

from muster import lean

# TLS is for those whose bus speaks it; the rest is imported by what is used, and hardly ever used
lean.later("ssl", classes=["SSLContext", "SSLSocket"])
for _seldom in ("asyncio.sslproto", "bz2", "difflib", "ipaddress", "lzma"):
    lean.later(_seldom)
# of use where there are GPUs
for _seldom in ("gpu_health", "gpu_units", "nvml", "presets", "simulated"):
    lean.later(f"muster_plugin.{_seldom}")
lean.load("hashlib", without=["_hashlib"])
lean.load(
    "structlog",
    without=["rich"],
    hollow=[
        "pickle",
        "structlog.dev",
        "structlog.stdlib",
        "structlog.testing",
        "structlog.threadlocal",
        "structlog.tracebacks",
        "structlog.twisted",
    ],
)
lean.load("grpc.aio", hollow=["typing_extensions"])
if api_implementation.Type() != "python":
    lean.load(
        "google.protobuf.internal.builder", hollow=["google.protobuf.internal.python_message"]
    )
lean.load("muster.entry")
lean.load("muster.vocabulary")

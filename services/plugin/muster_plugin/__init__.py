"""Door to the plugin's packages. Speaks the kubelet's API on one node, and reports to the bus.

The heavy packages are loaded here because this runs before every module of the room: whoever
imports structlog first decides what it drags in.
"""

from muster_plugin import lean

lean.load("structlog", without=["rich"])
lean.load("grpc.aio")

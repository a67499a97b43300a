"""Adapter for files: defines the cluster's directories, addresses and versions."""

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
TOOLS: Final = ROOT / "tests/cluster/tools"
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "muster/cluster"
STATE: Final = Path("/var/tmp/muster-cluster")  # noqa: S108  # only root writes below it
"""The directory for all files of a running cluster; short, because a socket's path may have at most
107 bytes.
"""
LOGS: Final = STATE / "logs"
CERTIFICATES: Final = STATE / "certificates"
KUBELET: Final = STATE / "kubelet"
"""The directory that the kubelet sees as /var/lib/kubelet."""
KUBECONFIG: Final = STATE / "kubeconfig"
CONTAINERD: Final = STATE / "containerd.sock"
CGROUP: Final = "muster-cluster"

VERSIONS: Final = ("1.37", "1.34")
"""The Kubernetes versions, newest first; each has a directory in TOOLS."""

NODE: Final = "muster-node"
LINK: Final = "mustercluster0"
"""This machine's network interface to the cluster."""
HOST_IP: Final = "192.168.244.1"
NODE_IP: Final = "192.168.244.2"
PODS: Final = "10.244.0.0/24"
SERVICES: Final = "10.96.0.0/16"
API_IP: Final = "10.96.0.1"
API: Final = f"https://{NODE_IP}:6443"
ETCD: Final = "http://127.0.0.1:2379"


class Refused(Exception):
    """The cluster cannot run here; the message gives the reason."""

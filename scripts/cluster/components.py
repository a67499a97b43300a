"""Adapter for files: writes each component's configuration, and returns its command."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.cluster import layout

_CERTIFICATES: Final = layout.CERTIFICATES
PAUSE: Final = "localhost/pause:1"
STATUS_PERIOD: Final = "2s"
"""How often the kubelet writes the node's status; the default of Kubernetes is 10 s."""
BACKOFF_MAX: Final = "5s"
"""The maximum back-off before a failed container is restarted; the default is 5 minutes."""


def etcd() -> list[str]:
    """Return the command of etcd; its data is disposable, so it does not sync to the disk."""
    return [
        "etcd",
        f"--data-dir={layout.STATE}/etcd",
        f"--listen-client-urls={layout.ETCD}",
        f"--advertise-client-urls={layout.ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=default=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver() -> list[str]:
    """Return the command of the API server, which is also reachable from this machine."""
    return [
        "kube-apiserver",
        f"--etcd-servers={layout.ETCD}",
        "--bind-address=0.0.0.0",
        f"--advertise-address={layout.NODE_IP}",
        f"--service-cluster-ip-range={layout.SERVICES}",
        f"--tls-cert-file={_CERTIFICATES}/apiserver.crt",
        f"--tls-private-key-file={_CERTIFICATES}/apiserver.key",
        f"--client-ca-file={_CERTIFICATES}/ca.crt",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={_CERTIFICATES}/sa.key",
        f"--service-account-signing-key-file={_CERTIFICATES}/sa.key",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={_CERTIFICATES}/kubelet-client.crt",
        f"--kubelet-client-key={_CERTIFICATES}/kubelet-client.key",
        f"--kubelet-certificate-authority={_CERTIFICATES}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
    ]


def scheduler() -> list[str]:
    """Return the command of the scheduler."""
    return ["kube-scheduler", *_client("scheduler"), "--bind-address=127.0.0.1"]


def controller_manager() -> list[str]:
    """Return the command of the controller manager."""
    return [
        "kube-controller-manager",
        *_client("controller-manager"),
        "--bind-address=127.0.0.1",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={_CERTIFICATES}/sa.key",
        f"--root-ca-file={_CERTIFICATES}/ca.crt",
        f"--cluster-signing-cert-file={_CERTIFICATES}/ca.crt",
        f"--cluster-signing-key-file={_CERTIFICATES}/ca.key",
    ]


def kubelet(*, status_period: str = STATUS_PERIOD) -> list[str]:
    """Return the command of the kubelet; `status_period` is a duration such as `10s`."""
    settings: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",  # noqa: S104  # of its own network namespace
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{_CERTIFICATES}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{_CERTIFICATES}/kubelet-server.crt",
        "tlsPrivateKeyFile": f"{_CERTIFICATES}/kubelet-server.key",
        "containerRuntimeEndpoint": f"unix://{layout.CONTAINERD}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.CGROUP}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [layout.NODE_IP],
        "resolvConf": "",
        "nodeStatusUpdateFrequency": status_period,
        "nodeStatusReportFrequency": status_period,
        "syncFrequency": "10s",
        "featureGates": {"KubeletCrashLoopBackOffMax": True},  # on by default since 1.35
        "crashLoopBackOff": {"maxContainerRestartPeriod": BACKOFF_MAX},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "maxPods": 200,
        # in a shared cgroup v1, only the owner of the machine may lower these values
        "oomScoreAdj": 0,
    }
    file = _written("kubelet.json", settings)
    return [
        "kubelet",
        f"--config={file}",
        f"--kubeconfig={_CERTIFICATES}/kubelet.kubeconfig",
        f"--hostname-override={layout.NODE}",
        f"--node-ip={layout.NODE_IP}",
    ]


def proxy() -> list[str]:
    """Return the command of kube-proxy, which makes Services reachable at their addresses."""
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{_CERTIFICATES}/proxy.kubeconfig"},
        "clusterCIDR": layout.PODS,
        "mode": "iptables",
        "conntrack": {"maxPerCore": 0, "min": 0},
        "hostnameOverride": layout.NODE,
    }
    return ["kube-proxy", f"--config={_written('proxy.json', settings)}"]


def dns() -> list[str]:
    """Return the command of CoreDNS, which runs on the node, not in a pod."""
    file = layout.STATE / "Corefile"
    file.write_text(f"""\
.:53 {{
  bind {layout.NODE_IP}
  errors
  ready {layout.NODE_IP}:8181
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {_CERTIFICATES}/dns.kubeconfig
    pods insecure
  }}
}}
""")
    return ["coredns", "-conf", str(file)]


def containerd() -> list[str]:
    """Return the command of containerd, with a pod network and the runtime runc."""
    network = {
        "cniVersion": "1.0.0",
        "name": layout.CGROUP,
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods0",
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": f"{layout.STATE}/addresses",
                    "ranges": [[{"subnet": layout.PODS}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
    networks = layout.STATE / "networks"
    networks.mkdir(exist_ok=True)
    (networks / "10-pods.conflist").write_text(json.dumps(network))
    file = layout.STATE / "containerd.toml"
    file.write_text(f"""\
version = 3
root = "{layout.STATE}/containerd"
state = "/run/containerd"
[grpc]
  address = "{layout.CONTAINERD}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE}"
[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  cdi_spec_dirs = ["/var/run/cdi"]
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{layout.STATE}/cni"]
    conf_dir = "{networks}"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
""")
    return ["containerd", "--config", str(file), "--log-level", "info"]


def _client(user: str) -> Sequence[str]:
    file = f"{_CERTIFICATES}/{user}.kubeconfig"
    return (
        f"--kubeconfig={file}",
        f"--authentication-kubeconfig={file}",
        f"--authorization-kubeconfig={file}",
        "--leader-elect=false",
    )


def _written(name: str, settings: Mapping[str, Any]) -> Path:
    file = layout.STATE / name
    file.write_text(json.dumps(settings, indent=1))
    return file

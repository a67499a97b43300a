"""A separate containerd with NRI, called through the CRI as a kubelet calls it.

It runs in PID and mount namespaces of its own, so that every shim, container and mount ends with
it. Needs root, and the containerd that `make cluster` has built.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from scripts.cluster import tools

IMAGE: Final = "localhost/busybox:nri"
_BUSYBOX: Final = Path("/bin/busybox")
_START_S: Final = 60.0
# name, number and type of each field (kubernetes/cri-api pkg/apis/runtime/v1/api.proto); the type
# of a message has a capital, `*` marks a repeated field
_MESSAGES: Final = {
    "Version": "version 1 string",
    "Metadata": "name 1 string, uid 2 string, namespace 3 string",
    "Namespaces": "network 1 int32",
    "SandboxSecurity": "namespace_options 1 Namespaces",
    "LinuxSandbox": "cgroup_parent 1 string, security_context 2 SandboxSecurity",
    "SandboxConfig": (
        "metadata 1 Metadata, log_directory 3 string, annotations 7 map, linux 8 LinuxSandbox"
    ),
    "RunPodSandbox": "config 1 SandboxConfig",
    "Sandbox": "pod_sandbox_id 1 string",
    "Name": "name 1 string",
    "Image": "image 1 string",
    "CDIDevice": "name 1 string",
    "ContainerConfig": (
        "metadata 1 Name, image 2 Image, command 3 *string, CDI_devices 17 *CDIDevice"
    ),
    "CreateContainer": (
        "pod_sandbox_id 1 string, config 2 ContainerConfig, sandbox_config 3 SandboxConfig"
    ),
    "Container": "container_id 1 string",
    "ExecSync": "container_id 1 string, cmd 2 *string, timeout 3 int64",
    "Executed": "stdout 1 bytes, stderr 2 bytes, exit_code 3 int32",
    "Empty": "",
    "Filter": "id 1 string",
}
_METHODS: Final = {
    "Version": ("Version", "Empty"),
    "RunPodSandbox": ("RunPodSandbox", "Sandbox"),
    "RemovePodSandbox": ("Sandbox", "Empty"),
    "CreateContainer": ("CreateContainer", "Container"),
    "StartContainer": ("Container", "Empty"),
    "RemoveContainer": ("Container", "Empty"),
    "ExecSync": ("ExecSync", "Executed"),
}
_HOST_NETWORK: Final = 2


def missing() -> str:
    """Return why no containerd can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "containers need root"
    if shutil.which("go") is None:
        return "Go, which builds containerd, is missing"
    if not tools.kept("containerd").is_dir():
        return "`make cluster` has not built containerd"
    lacks = [name for name in ("runc", "unshare") if shutil.which(name) is None]
    lacks += [] if _BUSYBOX.exists() else [str(_BUSYBOX)]
    return f"{', '.join(lacks)} is missing" if lacks else ""


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="cri.proto", package="cri", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            label, number, kind = field.split()
            added = message.field.add(name=label, number=int(number))
            is_repeated = kind.startswith("*") or kind == "map"
            added.label = kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL
            if kind == "map":
                entry = message.nested_type.add(name="AnnotationsEntry")
                entry.options.map_entry = True
                for position, part in enumerate(("key", "value"), start=1):
                    entry.field.add(
                        name=part,
                        number=position,
                        type=kinds.TYPE_STRING,
                        label=kinds.LABEL_OPTIONAL,
                    )
                added.type_name = f".cri.{name}.AnnotationsEntry"
            elif kind.lstrip("*")[0].isupper():
                added.type_name = f".cri.{kind.lstrip('*')}"
            if added.type_name:
                added.type = kinds.TYPE_MESSAGE
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.lstrip('*').upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"cri.{name}"))
        for name in _MESSAGES
    }


class Pod:
    """The sandbox of a pod, in which containers can be started."""

    def __init__(self, runtime: "Containerd", sandbox: str, config: Mapping[str, Any]) -> None:
        self.sandbox = sandbox
        self._runtime = runtime
        self._config = config

    def start(self, name: str, *, cdi: Sequence[str] = ()) -> "Container":
        """Create and start a container that sleeps, with CDI devices. Raises grpc.RpcError."""
        config = {
            "metadata": {"name": name},
            "image": {"image": IMAGE},
            "command": ["/bin/busybox", "sleep", "100000"],
            "CDI_devices": [{"name": name} for name in cdi],
        }
        created = self._runtime.call(
            "CreateContainer",
            {"pod_sandbox_id": self.sandbox, "config": config, "sandbox_config": self._config},
        )
        self._runtime.call("StartContainer", created)
        return Container(self._runtime, created["container_id"])


class Container:
    """A running container."""

    def __init__(self, runtime: "Containerd", container_id: str) -> None:
        self.id = container_id
        self._runtime = runtime

    def execute(self, *command: str) -> tuple[int, str]:
        """Run a command; return its exit code and its output."""
        done = self._runtime.call(
            "ExecSync",
            {"container_id": self.id, "cmd": ["/bin/busybox", *command], "timeout": 20},
            raw=True,
        )
        return done.exit_code, (done.stdout + done.stderr).decode()


class Containerd:
    """A containerd with its own root, state and sockets below a folder."""

    def __init__(self, folder: Path) -> None:
        self.nri = folder / "nri/nri.sock"
        self.cdi = folder / "cdi"
        self._folder = folder
        self._cgroup = f"/muster-nri-{os.getpid()}"
        self._socket = folder / "containerd.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = _messages()
        self._bin = tools.kept("containerd")
        self._pods = 0

    def start(self) -> None:
        """Start the namespaces and containerd in them; wait until it answers."""
        for name in ("root", "state", "nri", "cdi"):
            (self._folder / name).mkdir(exist_ok=True)
        (self._folder / "config.toml").write_text(f"""\
version = 3
root = "{self._folder}/root"
state = "{self._folder}/state"
[grpc]
  address = "{self._socket}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "native"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  cdi_spec_dirs = ["{self.cdi}"]
[plugins.'io.containerd.nri.v1.nri']
  socket_path = "{self.nri}"
  plugin_path = "{self._folder}/nri/plugins"
  plugin_config_path = "{self._folder}/nri/conf.d"
  [plugins.'io.containerd.nri.v1.nri'.default_validator]
    enable = true
""")
        first = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # the shell starts containerd again whenever it ends
        loop = f"while true; do containerd --config {self._folder}/config.toml & wait $!; done"
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*first, "sh", "-c", loop], stdout=log, stderr=log, env=self._environment()
            )
        self._wait()
        archive = self._folder / "image.tar"
        _write_image(archive)
        client = [str(self._bin / "ctr"), "-a", str(self._socket), "-n", "k8s.io"]
        options = ["--local", "--snapshotter", "native"]
        done = subprocess.run(
            [*client, "images", "import", *options, str(archive)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def restart(self) -> None:
        """Kill containerd, and wait until it runs again; its containers keep running."""
        before = self._containerd()
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + _START_S
        while self._containerd() in {0, before}:
            assert time.monotonic() < deadline, "containerd did not start again"
            time.sleep(0.05)
        self._wait()

    def stop(self) -> None:
        """End everything, and remove the cgroups."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for folder in Path("/sys/fs/cgroup").glob(f"*{self._cgroup}"):
            _remove_cgroup(folder)
        _remove_cgroup(Path(f"/sys/fs/cgroup{self._cgroup}"))

    def pod(self, annotations: Mapping[str, str], *, namespace: str = "default") -> Pod:
        """Run the sandbox of a pod in the host's network."""
        self._pods += 1
        config = {
            "metadata": {
                "name": f"pod-{self._pods}",
                "uid": f"uid-{self._pods}",
                "namespace": namespace,
            },
            "log_directory": str(self._folder),
            "annotations": dict(annotations),
            "linux": {
                "cgroup_parent": self._cgroup,
                "security_context": {"namespace_options": {"network": _HOST_NETWORK}},
            },
        }
        ran = self.call("RunPodSandbox", {"config": config})
        return Pod(self, ran["pod_sandbox_id"], config)

    def call(self, method: str, request: Mapping[str, Any], *, raw: bool = False) -> Any:
        """Call the runtime; return the answer as plain values, or as a message if `raw`."""
        sent, answered = (self._messages[name] for name in _METHODS[method])
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            stub: Any = channel.unary_unary(
                f"/runtime.v1.RuntimeService/{method}",
                sent.SerializeToString,
                answered.FromString,
            )
            answer = stub(json_format.ParseDict(dict(request), sent()), timeout=60)
        if raw:
            return answer
        return json_format.MessageToDict(answer, preserving_proto_field_name=True)

    def log(self) -> str:
        """Return the log of containerd."""
        return (self._folder / "log").read_text(errors="replace")

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"}

    def _containerd(self) -> int:
        """Return the process id of containerd, 0 if there is none."""
        assert self._process is not None
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = entry.read_bytes().split(b"\0")
                if command[0] == b"containerd" and str(self._folder).encode() in command[2]:
                    return int(entry.parent.name)
        return 0

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.call("Version", {})
            except grpc.RpcError:
                assert time.monotonic() < deadline, self.log()[-2000:]
                time.sleep(0.1)
            else:
                return


def _remove_cgroup(folder: Path) -> None:
    """Remove a cgroup and those below it, as soon as their processes have ended."""
    deadline = time.monotonic() + _START_S
    while folder.is_dir():
        try:
            for child in sorted(folder.rglob("*/"), reverse=True):
                child.rmdir()
            folder.rmdir()
        except OSError:
            assert time.monotonic() < deadline, f"{folder} is still in use"
            time.sleep(0.05)


def _write_image(archive: Path) -> None:
    """Write an image of busybox alone, in the format of `docker save`; its command is `sleep`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        folder = tarfile.TarInfo("bin")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        files.addfile(folder)
        files.add(_BUSYBOX.resolve(), "bin/busybox")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    settings = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": {"Cmd": ["/bin/busybox", "sleep", "100000"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    parts = {
        "layer.tar": layer.getvalue(),
        "config.json": json.dumps(settings).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    with tarfile.open(archive, "w") as files:
        for name, content in parts.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            files.addfile(member, io.BytesIO(content))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Containerd]:
    """Run a containerd below a folder until the block ends."""
    runtime = Containerd(folder)
    try:
        runtime.start()
        yield runtime
    finally:
        runtime.stop()

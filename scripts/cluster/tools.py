"""Adapter for the Go compiler: builds the cluster's programs from pinned modules into the cache.

The programs of a module are stored under a hash of its files, so that only a changed module is
rebuilt.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from scripts.cluster import layout

MODULES: Final = ("etcd", "containerd", "cni", "coredns", "helm", "nvidia-device-plugin")
"""The modules besides Kubernetes; the last one is a device plugin to compare with muster."""
CGO: Final = frozenset({"nvidia-device-plugin"})
"""The modules whose programs load a C library at run time."""
_GO: Final = (1, 26, 6)
"""The newest Go version that a module in TOOLS requires."""
_NAMES: Final = {"etcd": "server", "karpenter": "kwok"}
"""The program names that Go derives from directories, by module; each is renamed to the module."""
PACKAGES: Final = {
    "cc": "gcc",
    "/usr/include/stdlib.h": "libc6-dev",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "runc": "runc",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "/usr/lib/x86_64-linux-gnu/libseccomp.so.2": "libseccomp2",
    "/bin/busybox": "busybox-static",
}
"""The dependencies from Debian: the package of each command or file."""


def missing() -> str:
    """Return why the programs cannot be built or installed here; otherwise empty."""
    if problem := _go_problem():
        return problem
    if _missing_packages() and shutil.which("apt-get") is None:
        return f"missing, and there is no apt-get: {', '.join(_missing_packages())}"
    return ""


def install_packages(say: Callable[[str], None]) -> None:
    """Install missing Debian packages. Raises Refused if that is not possible."""
    packages = _missing_packages()
    if not packages:
        return
    say(f"apt-get install {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        # the machine may never have downloaded the package lists
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)
        done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise layout.Refused(f"apt-get install {' '.join(packages)}: {done.stderr.strip()[-300:]}")


def build(version: str, say: Callable[[str], None]) -> list[Path]:
    """Build the programs that are not in the cache; return the directories of all programs."""
    return [
        built(f"kubernetes-{version}", say),
        *(built(module, say) for module in MODULES),
    ]


def built(module: str, say: Callable[[str], None]) -> Path:
    """Return the directory with the programs of a module; build them if necessary."""
    source = layout.TOOLS / module
    target = kept(module)
    if target.is_dir():
        return target
    say(f"building {module} from Go modules (once; Kubernetes takes 5 to 10 minutes)")
    began = time.monotonic()
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    command = ["go", "build", "-trimpath", "-ldflags", _stamp(source), "-o", f"{unfinished}/"]
    command += ["."] if (source / "main.go").exists() else ["tool"]
    environment = {
        **os.environ,
        "CGO_ENABLED": str(int(module in CGO)),
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOTOOLCHAIN": "local",
    }
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(unfinished)
        raise layout.Refused(f"go build of {module}: {done.stderr.strip()[-1500:]}")
    if name := _NAMES.get(module):
        (unfinished / name).rename(unfinished / module)
    for old in target.parent.glob(f"{module}-*"):
        if old != unfinished:
            shutil.rmtree(old, ignore_errors=True)
    unfinished.rename(target)
    say(f"built {module} in {time.monotonic() - began:.0f} s")
    return target


def source(module: str, package: str) -> Path:
    """Return the directory with the source of a Go module that a module of TOOLS uses."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", package],
        cwd=layout.TOOLS / module, env={**os.environ, "GOTOOLCHAIN": "local"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise layout.Refused(f"go mod download {package}: {done.stderr or done.stdout}")
    return Path(json.loads(done.stdout)["Dir"])


def kept(module: str) -> Path:
    """Return the cache directory for the programs of a module, whether built or not."""
    return layout.CACHE / "bin" / f"{module}-{_hash(layout.TOOLS / module)}"


def version_of(minor: str) -> str:
    """Return the Kubernetes version that is pinned for a minor version, such as 1.37.2."""
    text = (layout.TOOLS / f"kubernetes-{minor}" / "go.mod").read_text()
    (version,) = re.findall(r"\bk8s\.io/kubernetes v(\S+)(?: // indirect)?$", text, re.MULTILINE)
    return str(version)


def _go_problem() -> str:
    wanted = "Go 1.26.6 or newer builds Kubernetes"
    if shutil.which("go") is None:
        return f"{wanted}; the PATH has no go (sudo has a PATH of its own)"
    version = subprocess.check_output(["go", "env", "GOVERSION"], text=True).strip()
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    return "" if numbers >= _GO else f"{wanted}; the PATH has {version}"


def _missing_packages() -> list[str]:
    return sorted(
        {
            package
            for name, package in PACKAGES.items()
            if shutil.which(name) is None and not Path(name).is_file()
        }
    )


def _stamp(source: Path) -> str:
    """Return linker flags with the version; clients refuse an API server with version v0.0.0."""
    kind, _, minor_version = source.name.partition("-")
    if kind != "kubernetes":
        return "-s -w"
    version = version_of(minor_version)
    major, minor, _ = version.split(".")
    stamps = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    flags: Sequence[str] = [
        f"-X {package}.{name}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in stamps.items()
    ]
    return " ".join(("-s -w", *flags))


def _hash(source: Path) -> str:
    digest = hashlib.sha256(subprocess.check_output(["go", "version"]))
    for name in ("go.mod", "go.sum", "main.go"):
        if (source / name).exists():
            digest.update((source / name).read_bytes())
    return digest.hexdigest()[:12]

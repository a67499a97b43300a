"""Adapter: the programs of the cluster, built from pinned Go modules into the cache.

What a module gives is kept under a hash of its files, so that a changed pin is built anew and
nothing else is.
"""

import hashlib
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
"""Beside Kubernetes itself, in each of its versions; the last is what muster is compared with."""
CGO: Final = frozenset({"nvidia-device-plugin"})
"""What loads a C library while it runs."""
_GO: Final = (1, 26, 6)
"""The newest that a module in TOOLS asks for."""
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
"""What comes from Debian: a command or file, and its package."""


def missing() -> str:
    """Return what keeps the programs from being built or installed here; empty if nothing does."""
    if problem := _go_problem():
        return problem
    if _missing_packages() and shutil.which("apt-get") is None:
        return f"missing, and there is no apt-get: {', '.join(_missing_packages())}"
    return ""


def install_packages(say: Callable[[str], None]) -> None:
    """Install the Debian packages that are missing; raise Refused where that cannot be done."""
    packages = _missing_packages()
    if not packages:
        return
    say(f"apt-get install {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        # a machine that never asked for the lists of packages
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)
        done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise layout.Refused(f"apt-get install {' '.join(packages)}: {done.stderr.strip()[-300:]}")


def build(version: str, say: Callable[[str], None]) -> list[Path]:
    """Build what is not in the cache yet; return the folders of all programs."""
    return [
        built(f"kubernetes-{version}", say),
        *(built(module, say) for module in MODULES),
    ]


def built(module: str, say: Callable[[str], None]) -> Path:
    """Return the folder with the programs of a module, building them if need be."""
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
    if module == "etcd":
        # Go names a program after its folder
        (unfinished / "server").rename(unfinished / "etcd")
    for old in target.parent.glob(f"{module}-*"):
        if old != unfinished:
            shutil.rmtree(old, ignore_errors=True)
    unfinished.rename(target)
    say(f"built {module} in {time.monotonic() - began:.0f} s")
    return target


def kept(module: str) -> Path:
    """Return the folder that the programs of a module have in the cache, built or not."""
    return layout.CACHE / "bin" / f"{module}-{_hash(layout.TOOLS / module)}"


def version_of(minor: str) -> str:
    """Return the whole version of Kubernetes that is pinned for a minor version: 1.37.2."""
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
    """Return linker flags; unstamped, an API server calls itself v0.0.0 and clients refuse it."""
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

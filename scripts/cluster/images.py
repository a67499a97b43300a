"""Adapter for buildah: builds the images of pods, and stores them as archives in the cache.

muster's own image is built from the Dockerfile, on a Debian base image made by debootstrap; no
registry is used.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from muster.local import nats
from scripts.cluster import components, layout

MUSTER: Final = "localhost/muster:test"
BUSYBOX: Final = "localhost/busybox:1"
PREVIOUS: Final = "localhost/muster:previous"
PREVIOUS_COMMIT: Final = "5b9cb4115a4476752ee30266c5b71a89f7a84183"
"""The commit from which upgrades are tested until there is a release.

It is the oldest commit with the present chart.
"""
_BASES: Final = {
    "localhost/python:3.11-slim": "python3,python3-venv,ca-certificates",
    "localhost/musl:1": "gcc,make,musl-tools",
}
"""The packages of the Debian base images: one to run services, one to compile the helper."""
FUSE_PROGRAMS: Final = "localhost/fuse-programs:1"
"""A Debian image with sshfs, an SSH server, and a user 1000."""
_SOURCES: Final = (
    *("Dockerfile", "requirements", "muster", "services", "pyproject.toml"),
    "scripts/entry_points.py",
)
_SUITE: Final = "bookworm"
_PROGRAMS: Final = "openssh-server,procps,sshfs"
_USER: Final = ("useradd", "--uid", "1000", "--password", "*", "user")
"""`*` matches no password, but does not lock the account: sshd refuses locked accounts."""
_PAUSE: Final = '["/bin/sh", "-c", "trap \'exit 0\' TERM; sleep infinity & wait"]'


def nats_name() -> str:
    """Return the name of the NATS image in muster's manifests."""
    text = (layout.ROOT / "k8s/base/nats.yaml").read_text()
    (name,) = re.findall(r"image: (\S*nats:\S+)", text)
    return str(name)


def build(say: Callable[[str], None]) -> list[Path]:
    """Build the images that are not in the cache; return the archives of all images."""
    server, busybox = nats.binary(), Path("/bin/busybox")
    # fmt: off
    makers: Iterable[tuple[str, str, Callable[[Path], None]]] = (
        ("busybox", digest(busybox), lambda file: _busybox(file, BUSYBOX, '["/bin/sh"]')),
        ("pause", digest(busybox), lambda file: _busybox(file, components.PAUSE, _PAUSE)),
        ("nats", digest(server), lambda file: _nats(file, server)),
        ("fuse-programs", _hash_text(_SUITE, _PROGRAMS, *_USER), _fuse_programs),
        ("muster", digest(*(layout.ROOT / name for name in _SOURCES)), _muster),
    )
    # fmt: on
    return [kept(name, made_of, make, say) for name, made_of, make in makers]


def previous(say: Callable[[str], None]) -> Path:
    """Return the archive of the image of muster's previous version."""

    def make(file: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            unpack(PREVIOUS_COMMIT, Path(folder))
            _muster(file, PREVIOUS, Path(folder))

    return kept("previous", PREVIOUS_COMMIT[:12], make, say)


def unpack(commit: str, folder: Path) -> None:
    """Write the files of a commit into a directory. Raises Refused if git lacks the commit."""
    archive = folder / "archive.tar"
    _checked("git", "archive", f"--output={archive}", commit)
    _checked("tar", "-xf", str(archive), "-C", str(folder))
    archive.unlink()


def kept(name: str, made_of: str, make: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """Return the archive of an image in the cache; build it if its sources have changed."""
    folder = layout.CACHE / "images"
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{name}-{made_of}.tar"
    if not archive.exists():
        say(f"building the image {name}")
        unfinished = archive.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        make(unfinished)
        for old in folder.glob(f"{name}-*.tar"):
            old.unlink()
        unfinished.rename(archive)
    return archive


def one_program(file: Path, program: Path, name: str, *, has_libc: bool) -> None:
    """Build the image of one program in `/`, on a Debian base image or from scratch."""
    python, _ = _BASES
    if has_libc:
        _base(python)
    container = _buildah("from", python if has_libc else "scratch")
    _buildah("add", "--chmod", "755", container, str(program), f"/{program.name}")
    _buildah("config", "--entrypoint", json.dumps([f"/{program.name}"]), "--cmd", "", container)
    _commit(container, name, file)


def _busybox(file: Path, name: str, command: str) -> None:
    container = _buildah("from", "scratch")
    _buildah("add", container, "/bin/busybox", "/bin/busybox")
    applets = subprocess.check_output(["/bin/busybox", "--list"], text=True).split()
    links = layout.CACHE / "images/applets"
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir()
    for applet in applets:
        if applet != "busybox":
            (links / applet).symlink_to("busybox")
    _buildah("add", container, str(links), "/bin")
    shutil.rmtree(links)
    _buildah("config", "--entrypoint", "[]", "--cmd", command, container)
    _commit(container, name, file)


def _nats(file: Path, server: Path) -> None:
    container = _buildah("from", "scratch")
    _buildah("add", "--chmod", "755", container, str(server), "/nats-server")
    _buildah("config", "--entrypoint", '["/nats-server"]', container)
    _commit(container, nats_name(), file)


def _muster(file: Path, name: str = MUSTER, source: Path = layout.ROOT) -> None:
    for base in _BASES:
        _base(base)
    # the build has no package index, so the wheels come from this directory
    _checked(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps"),
        *("-r", "requirements/services.lock", "-d", "build/wheels"),
        source=source,
    )
    python, musl = _BASES
    _buildah(
        *("build", "--isolation", "chroot", "--network", "host", "--layers"),
        *("--build-arg", f"PYTHON_IMAGE={python}", "--build-arg", f"HELPER_IMAGE={musl}"),
        *("--build-arg", "PIP_OPTIONS=--no-index --find-links /wheels"),
        *("--target", "services", "--tag", name, "."),
        source=source,
    )
    _buildah("push", name, f"oci-archive:{file}:{name}")


def _fuse_programs(file: Path) -> None:
    base = "localhost/fuse-programs-base:1"
    _debian(base, _PROGRAMS)
    container = _buildah("from", base)
    _buildah("run", "--isolation", "chroot", container, *_USER)
    _buildah("config", "--entrypoint", "[]", "--cmd", '["/bin/sh"]', container)
    _commit(container, FUSE_PROGRAMS, file)


def _base(name: str) -> None:
    if not _buildah("images", "--quiet", "--filter", f"reference={name}"):
        _debian(name, _BASES[name])


def _debian(name: str, packages: str) -> None:
    rootfs = layout.CACHE / "rootfs"
    shutil.rmtree(rootfs, ignore_errors=True)
    _checked("debootstrap", "--variant=minbase", f"--include={packages}", _SUITE, str(rootfs))
    container = _buildah("from", "scratch")
    _buildah("add", container, str(rootfs), "/")
    _buildah("commit", "--rm", container, name)
    shutil.rmtree(rootfs)


def _commit(container: str, name: str, file: Path) -> None:
    _buildah("commit", "--rm", container, f"oci-archive:{file}:{name}")


def _buildah(*arguments: str, source: Path = layout.ROOT) -> str:
    storage = layout.CACHE / "buildah"
    options = ("--root", str(storage), "--runroot", str(storage / "run"))
    return _checked("buildah", *options, *arguments, source=source).strip()


def _checked(*command: str, source: Path = layout.ROOT) -> str:
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise layout.Refused(f"{' '.join(command[:6])} ...: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _hash_text(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def digest(*paths: Path) -> str:
    """Return a digest of these files and directories."""
    summed = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                summed.update(str(file.relative_to(path.parent)).encode())
                summed.update(file.read_bytes())
    return summed.hexdigest()[:12]

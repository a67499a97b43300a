"""Adapter for the fake libnvidia-ml.so.1: builds it, sets its answers, reads its counts.

The state file is text, one fact a line; `#` begins a comment, `_` in a name stands for a space. An
invalid line ends the process that loaded the library; no line is ignored. A value is a number (also
0x...), `-` for NOT_SUPPORTED or `!n` for error n; `*` as a GPU means every GPU.

    driver 580.95.05 | cuda 13000
    init 9                      the result of nvmlInit while NVML is not initialised
    epoch 1 [code]              a new number is a newly loaded driver: a process that initialised
                                NVML before gets this code (default 9) from every call, until it
                                has shut NVML down and initialised it again
    hotplug 1                   the list of GPUs follows the file; otherwise it is the list at
                                nvmlInit, and a GPU that is no longer in the file is lost
    wait_cut 5                  a wait for events lasts at most 5 ms
    gpu 0 uuid= name= bus= serial= vbios= cluster=<uuid> cc=9.0 remap=0,0,1,0 KEY=value...
                                KEY is one of VALUES at the top of nvml.c; remap= is corrected,
                                uncorrected, pending, failed. events= is the mask of supported
                                events, hole= the error of an empty MIG index
    mig 0 slot=0 gi=3 ci=0 uuid= name= gprofile= cprofile= memory_mb= sm= ce= dec= enc= jpeg= ofa=
          gi_slices= ci_slices= start= size=
    gprofile * profile= id= name= slices= instances= memory_mb= sm= ce= dec= enc= jpeg= ofa= p2p=
    cprofile * gprofile= profile= id= name= slices= instances= sm= ce= dec= enc= jpeg= ofa=
    link 0 1 level=20 nvlinks=4 p2p=5      p2p= is the result of nvmlDeviceGetP2PStatus
    nvlink 0 3 state=0 errors=5            one link of a GPU; errors= are flit CRC errors
    field 0 id=230 value=1 type=1 code=0   a field's value, which overrides the GPU's keys
    lost 0                      every call on this GPU fails with GPU_IS_LOST, and so does, at once,
                                every wait of an event set in which it is registered
    error call=nvmlDeviceGetName gpu=0 code=15 times=2
    hang call=nvmlDeviceGetName gpu=0 ms=500 times=1
                                call= may omit the version; `*`, or no call=, means all calls but
                                init and shutdown. Without ms= a call hangs until the line is
                                removed. Uses of times= are counted by the text of the line
    xid seq=17 gpu=0 xid=79 gi=3 ci=0 nowhere=1
    event seq=18 gpu=0 type=0x100 data=0 gi= ci= nowhere=1
                                delivered once to every event set in which the GPU was registered
                                before; seq must increase; nowhere=1 reports an unknown device

Without a state file the driver is not loaded (error 9).
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.worlds.nvml import scenes

SOURCE: Final = Path(__file__).with_name("nvml.c")
SONAME: Final = "libnvidia-ml.so.1"
STATE: Final = "MUSTER_FAKE_NVML"
COUNTS: Final = "MUSTER_FAKE_NVML_COUNTS"
FLAGS: Final = (
    *("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"),
    f"-Wl,-soname,{SONAME}",
)
_HEAD: Final = struct.Struct("<8sII48x")
_ROW: Final = struct.Struct("<48sQQ")
_MISUSE: Final = "misuse."


class NoCompiler(Exception):
    """This machine cannot compile C; the message contains the reason."""


def built(directory: Path | None = None) -> Path:
    """Return the path of the compiled library libnvidia-ml.so.1; compile it if necessary.

    It is stored below `directory` (by default a temporary directory of this user), in a folder
    named by a hash of source and flags. Parallel callers may each compile it, but never see an
    incomplete file. Raises NoCompiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompiler("compile tests/worlds/nvml/nvml.c: there is no `cc` in the PATH")
    home = directory or Path(tempfile.gettempdir()) / f"muster-fake-nvml-{os.getuid()}"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        raise NoCompiler(f"compile tests/worlds/nvml/nvml.c: {home} belongs to another user")
    made_of = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    built = home / made_of / SONAME
    if not built.exists():
        _compile(compiler, built)
    return built


def _compile(compiler: str, built: Path) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent.parent) as room:
        fresh = Path(room) / SONAME
        command = [compiler, *FLAGS, "-o", str(fresh), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoCompiler(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        built.parent.mkdir(exist_ok=True)
        fresh.replace(built)


class Fake:
    """The state and counts of one fake; a change applies to every call that begins after it."""

    def __init__(self, state_file: Path) -> None:
        self.state_file = state_file
        self.counts_file = state_file.with_name(f"{state_file.name}.counts")
        self.scene = scenes.Scene()
        self._seq = 0
        self._stamp = 0

    def environment(self, built: Path | None = None) -> dict[str, str]:
        """Return the environment in which a process uses this state, and the library `built`."""
        library = {STATE: str(self.state_file), COUNTS: str(self.counts_file)}
        return library | ({"LD_LIBRARY_PATH": str(built.parent)} if built else {})

    def write(self, scene: scenes.Scene) -> None:
        """Write a scene to the state file.

        The file's modification time always increases. Otherwise the library would miss a change
        that leaves size, inode and time the same.
        """
        self.scene = scene
        self._stamp = max(time.time_ns(), self._stamp + 1000)
        fresh = self.state_file.with_name(f"{self.state_file.name}.new")
        fresh.write_text(scene.text())
        os.utime(fresh, ns=(self._stamp, self._stamp))
        fresh.replace(self.state_file)

    def unload(self) -> None:
        """Simulate a machine without a loaded driver, until the next `write`."""
        self.state_file.unlink(missing_ok=True)

    def add(self, *lines: str) -> None:
        """Add lines to the state."""
        self.write(self.scene.also(*lines))

    def drop(self, *starts: str) -> None:
        """Remove added lines that begin with one of `starts`; without arguments, all of them."""
        kept = [line for line in self.scene.lines if starts and not line.startswith(starts)]
        fresh = dataclasses.replace(self.scene, lines=tuple(kept))
        self.write(fresh)

    def xid(self, gpu: int, xid: int, *, gi: int = -1, ci: int = -1, more: str = "") -> None:
        """Report an XID to the listeners of that GPU."""
        self._seq += 1
        self.add(f"xid seq={self._seq} gpu={gpu} xid={xid} gi={gi} ci={ci} {more}".rstrip())

    def event(self, gpu: int, kind: int, *, data: int = 0) -> None:
        """Report an event of another type to the listeners of that GPU."""
        self._seq += 1
        self.add(f"event seq={self._seq} gpu={gpu} type={kind} data={data}")

    def counts(self) -> Mapping[str, int]:
        """Return how often each function was called, by its exported name, without zeros."""
        return {name: calls for name, calls, _ in self._rows() if calls}

    def failures(self) -> Mapping[str, int]:
        """Return how often each function returned an error, without zeros."""
        return {name: failed for name, _, failed in self._rows() if failed}

    def misuses(self) -> Mapping[str, int]:
        """Return how often each misuse that may crash a real driver occurred; nvml.c lists them."""
        rows = self.counts().items()
        return {name.removeprefix(_MISUSE): n for name, n in rows if name.startswith(_MISUSE)}

    def peak(self) -> int:
        """Return the highest number of concurrent calls."""
        raw = self._raw()
        return int(_HEAD.unpack_from(raw)[2]) if raw else 0

    def _raw(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self.counts_file.read_bytes()
        return b""

    def _rows(self) -> list[tuple[str, int, int]]:
        raw = self._raw()
        if not raw:
            return []
        rows = _ROW.iter_unpack(raw[_HEAD.size :])
        return [(name.rstrip(b"\0").decode(), calls, failed) for name, calls, failed in rows]

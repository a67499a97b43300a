"""Adapter for the fake libnvidia-ml.so.1: builds it, sets its answers, reads its counts.

The state file is text, one fact a line; `#` begins a comment, `_` in a name is a space. A line that
is not understood ends the process that loaded the library: nothing is ever ignored. A value is
a number (0x.. too), `-` for NOT_SUPPORTED or `!n` for the error n; `*` as a GPU is every GPU.

    driver 580.95.05 | cuda 13000
    init 9                      what nvmlInit answers while NVML is not initialised
    epoch 1 [code]              a newly loaded driver: sessions from before get this code
                                (9) at every call until it has shut down and initialised again
    hotplug 1                   the list of GPUs follows the file; else it is that of nvmlInit, and
                                a GPU no longer in the file is lost
    wait_cut 5                  no wait lasts longer than so many ms, then TIMEOUT
    gpu 0 uuid= name= bus= serial= vbios= cluster=<uuid> cc=9.0 remap=0,0,1,0 KEY=value...
                                KEY: VALUES at the top of nvml.c; remap= is corrected, uncorrected,
                                pending, failed. events= is the mask of supported events, hole= what
                                an empty MIG index answers
    mig 0 slot=0 gi=3 ci=0 uuid= name= gprofile= cprofile= memory_mb= sm= ce= dec= enc= jpeg= ofa=
          gi_slices= ci_slices= start= size=
    gprofile * profile= id= name= slices= instances= memory_mb= sm= ce= dec= enc= jpeg= ofa= p2p=
    cprofile * gprofile= profile= id= name= slices= instances= sm= ce= dec= enc= jpeg= ofa=
    link 0 1 level=20 nvlinks=4 p2p=5      p2p= is what nvmlDeviceGetP2PStatus answers
    nvlink 0 3 state=0 errors=5            one link of a GPU; errors= are flit CRC errors
    field 0 id=230 value=1 type=1 code=0   a field's value, against what the GPU's keys say
    lost 0                      every call on it answers GPU_IS_LOST, and at once every wait of a
                                set on which it is registered
    error call=nvmlDeviceGetName gpu=0 code=15 times=2
    hang call=nvmlDeviceGetName gpu=0 ms=500 times=1
                                call= may lack its version; `*` is all but init and shutdown, and so
                                is no call=. Without ms= it hangs until the line is taken away. What
                                was used up of times= is remembered by the text of the line
    xid seq=17 gpu=0 xid=79 gi=3 ci=0 nowhere=1
    event seq=18 gpu=0 type=0x100 data=0 gi= ci= nowhere=1
                                delivered once to every set on which the GPU was registered before;
                                seq grows; nowhere=1 names an unknown device

With no state file the driver is not loaded (9).
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
    """This machine cannot compile C; the message says what was missing."""


def built(directory: Path | None = None) -> Path:
    """Return the compiled library, a file named libnvidia-ml.so.1; compile it if it is not there.

    It is kept below `directory` (else below the system's, one for each user) by what it was made
    of, so that parallel callers make it at most once each and never see half of it.
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
    """The answers of one fake; a change applies to every call that begins after it was written."""

    def __init__(self, state_file: Path) -> None:
        self.state_file = state_file
        self.counts_file = state_file.with_name(f"{state_file.name}.counts")
        self.scene = scenes.Scene()
        self._seq = 0
        self._stamp = 0

    def environment(self, built: Path | None = None) -> dict[str, str]:
        """Return the variables with which a process finds the library and this state."""
        library = {STATE: str(self.state_file), COUNTS: str(self.counts_file)}
        return library | ({"LD_LIBRARY_PATH": str(built.parent)} if built else {})

    def write(self, scene: scenes.Scene) -> None:
        """Answer from this scene from now on.

        The stamp of the file always grows: the same size, inode and tick of the clock would hide a
        change otherwise.
        """
        self.scene = scene
        self._stamp = max(time.time_ns(), self._stamp + 1000)
        fresh = self.state_file.with_name(f"{self.state_file.name}.new")
        fresh.write_text(scene.text())
        os.utime(fresh, ns=(self._stamp, self._stamp))
        fresh.replace(self.state_file)

    def unload(self) -> None:
        """Be a machine without a loaded driver, until the next `write`."""
        self.state_file.unlink(missing_ok=True)

    def add(self, *lines: str) -> None:
        """Add lines to the state."""
        self.write(self.scene.also(*lines))

    def drop(self, *starts: str) -> None:
        """Take away the added lines that start so; with no argument all of them."""
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
        """Return how often each function was called, by its exported name; none were not."""
        return {name: calls for name, calls, _ in self._rows() if calls}

    def failures(self) -> Mapping[str, int]:
        """Return how often each function answered an error; none did not."""
        return {name: failed for name, _, failed in self._rows() if failed}

    def misuses(self) -> Mapping[str, int]:
        """Return what a real driver would have crashed on, by name, as nvml.c lists them."""
        rows = self.counts().items()
        return {name.removeprefix(_MISUSE): n for name, n in rows if name.startswith(_MISUSE)}

    def peak(self) -> int:
        """Return how many calls were under way at once at most."""
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

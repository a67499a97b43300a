"""A pod's socket in a directory that root in the pod may write to, if only for a moment."""

import asyncio
import contextlib
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from muster_fuse.broker import sockets

_SWAPS = """
import contextlib, os, sys
directory, victim = sys.argv[1:]
print("ready", flush=True)
while True:
    with contextlib.suppress(OSError):
        os.symlink(victim, directory + "/swap")
        os.rename(directory + "/swap", directory + "/broker.sock.new")
"""
_TIMES = 300


def test_no_link_in_the_directory_makes_another_file_open_to_everybody() -> None:
    with tempfile.TemporaryDirectory(prefix="mu-", ignore_cleanup_errors=True) as place:
        directory, victim = Path(place, "pod"), Path(place, "victim")
        directory.mkdir()
        victim.write_text("secret")
        victim.chmod(0o600)

        async def serve() -> None:
            listener = sockets.Listener(connections=1, discard=lambda _: asyncio.sleep(0))
            with contextlib.suppress(OSError):
                await listener.start(directory / "broker.sock", lambda _: asyncio.sleep(0))
            await listener.stop(wait_s=1.0)

        async def story() -> None:
            for _ in range(_TIMES):
                await serve()

        command = [sys.executable, "-c", _SWAPS, str(directory), str(victim)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as swapping:
            assert swapping.stdout is not None
            assert swapping.stdout.readline() == b"ready\n"
            asyncio.run(story())
            swapping.kill()
        assert stat.S_IMODE(victim.stat().st_mode) == 0o600


def test_a_socket_is_open_to_everybody() -> None:
    with tempfile.TemporaryDirectory(prefix="mu-") as place:
        path = Path(place, "broker.sock")

        async def story() -> str:
            listener = sockets.Listener(connections=1, discard=lambda _: asyncio.sleep(0))
            await listener.start(path, lambda _: asyncio.sleep(0))
            mode = stat.filemode(path.stat().st_mode)
            await listener.stop(wait_s=1.0)
            return mode

        assert asyncio.run(story()) == "srw-rw-rw-"

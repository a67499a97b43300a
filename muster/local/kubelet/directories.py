"""Adapter: the kubelet's directories: its own sockets, those of plugins, its checkpoint file."""

import contextlib
import os
import pathlib
import socket
import stat
import tempfile
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import msgspec

from muster.local import httpd
from muster.local.kubelet import device_manager

CHECKPOINT = "kubelet_internal_checkpoint"
# `sun_path` holds 108 bytes, the last of them 0.
_PATH_BYTES_MAX = 107


def prepare(directory: pathlib.Path, *, own_socket: str) -> None:
    """Make the directory. Raises UsageError if `own_socket` cannot be served in it.

    A live server there is another kubelet. The real one would replace its socket without asking; a
    stand-in that was started with the wrong directory must not.
    """
    path = directory / own_socket
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise httpd.UsageError(f"{path}: longer than {_PATH_BYTES_MAX} bytes, no socket fits")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise httpd.UsageError(f"cannot make {directory}: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise httpd.UsageError(f"no permission to write in {directory}")
    if _is_served(path):
        raise httpd.UsageError(f"another kubelet serves {path}")


def wipe(directory: pathlib.Path) -> None:
    """Remove every socket in the directory, and nothing else (CleanupPluginDirectory, 1.36)."""
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()


@contextlib.asynccontextmanager
async def serving(path: pathlib.Path, handler: grpc.GenericRpcHandler) -> AsyncIterator[None]:
    """Serve on a socket while the block runs; then cut every call and remove the socket."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handler])
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise httpd.UsageError(f"cannot serve on {path}: {error}") from error
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def write_checkpoint(directory: pathlib.Path, checkpoint: device_manager.Checkpoint) -> None:
    """Replace the checkpoint as a whole, so that a kill leaves the old or the new one."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{CHECKPOINT}.", delete=False) as new:
        new.write(msgspec.json.encode(checkpoint))
    pathlib.Path(new.name).replace(directory / CHECKPOINT)


def read_checkpoint(directory: pathlib.Path) -> device_manager.Checkpoint:
    """Read the checkpoint of an earlier kubelet. Raises UsageError."""
    path = directory / CHECKPOINT
    try:
        return msgspec.json.decode(path.read_bytes(), type=device_manager.Checkpoint)
    except FileNotFoundError:
        return device_manager.Checkpoint()
    except (OSError, msgspec.MsgspecError) as error:
        raise httpd.UsageError(f"cannot read checkpoint {path}: {error}") from error


def _is_served(path: pathlib.Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True

"""Whether the server on this machine has a GPU open. It tells nothing of that itself."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_LISTEN = "0A"
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


def gpu_of(url: str) -> str:
    """The GPU device that the process behind a URL's port has open.

    The result is empty if the process has none open, or if the process can't be seen.
    """
    port = urlsplit(url).port or 80
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            targets = [os.readlink(place) for place in (process / "fd").iterdir()]
            if sockets.isdisjoint(targets):
                continue
            for target in targets:
                if target.startswith(_DEVICES):
                    return target
    return ""


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]

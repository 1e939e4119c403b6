"""What execnet starts for `python -u -c CODE`: that process, forked from tests/zygote.py.

Run as `python -S -E tests/launcher.py SOCKET -u -c CODE`. It hands its standard input and output to
the zygote's child, and lives as long as that. Without a zygote it becomes the plain command.
"""

import os
import socket
import sys


def main(address: str, *words: str) -> None:
    with socket.socket(socket.AF_UNIX) as zygote:
        try:
            zygote.connect(address)
            socket.send_fds(zygote, [b"?"], [0, 1])
            is_forked = zygote.recv(1) != b""
        except OSError:
            is_forked = False
        if not is_forked:
            os.execv(sys.executable, [sys.executable, *words])
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        zygote.recv(1)  # nothing comes but the end


if __name__ == "__main__":
    main(*sys.argv[1:])

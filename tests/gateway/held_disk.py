"""`python -m tests.gateway.held_disk FILE WORDS`: a gateway whose journal waits while FILE exists.

The wait is before the write, so that a kill then leaves nothing of the group.
"""

import os
import sys
import time
from pathlib import Path

from gateway.cli.main import main
from gateway.journal import writer

HOLD = Path(sys.argv[1])
_write = os.pwrite


def held(file: int, content: bytes, offset: int) -> int:
    while HOLD.exists():
        time.sleep(0.005)
    return _write(file, content, offset)


if __name__ == "__main__":
    os.pwrite = held
    # The test ends the wait, also on a machine that is busy.
    writer._DEADLINE_SECONDS = 600.0
    sys.exit(main(sys.argv[2:]))

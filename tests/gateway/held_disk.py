"""`python -m tests.gateway.held_disk FILE WORDS`: a gateway whose journal waits while FILE exists.

The wait is before the write, so that a kill then leaves nothing of the group.
"""

import sqlite3
import sys
import time
from pathlib import Path

from gateway.cli.main import main
from gateway.journal import store

HOLD = Path(sys.argv[1])
_commit = store._commit


def held(db: sqlite3.Connection) -> None:
    while HOLD.exists():
        time.sleep(0.005)
    _commit(db)


if __name__ == "__main__":
    store._commit = held
    # The test ends the wait, also on a machine that is busy.
    store._DEADLINE_SECONDS = 600.0
    sys.exit(main(sys.argv[2:]))

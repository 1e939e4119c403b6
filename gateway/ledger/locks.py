"""How long a statement waits for an SQLite file that another connection writes to.

Nothing ends SQLite's own wait. So SQLite waits a quarter of a second, and the statement is run
again until its time is over, or until the process is about to end.
"""

import sqlite3
import time
from typing import Any

from sqlalchemy import Engine, event

_WAIT_MS = 250


class LockPatience:
    """Shared by the connections of one or more engines."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def watch(self, engine: Engine) -> None:
        """Hold for every connection that the engine makes from now on."""
        event.listen(engine, "connect", _shorten)
        event.listen(engine, "do_execute", self._execute)
        event.listen(engine, "do_executemany", self._execute_many)

    def hurry(self) -> None:
        """From now on nothing, also what waits already, waits for longer than SQLite itself."""
        self._seconds = 0.0

    def _execute(self, cursor: Any, statement: str, values: Any, _context: Any) -> bool:
        self._until_unlocked(cursor.execute, statement, values)
        return True

    def _execute_many(self, cursor: Any, statement: str, values: Any, _context: Any) -> bool:
        self._until_unlocked(cursor.executemany, statement, values)
        return True

    def _until_unlocked(self, run: Any, statement: str, values: Any) -> None:
        begun = time.monotonic()
        while True:
            try:
                run(statement, values)
                return
            except sqlite3.OperationalError as error:
                # Nothing was written: the first statement that writes takes the lock for the whole
                # transaction. Extended codes, as of an outdated snapshot, come again at once.
                is_locked = error.sqlite_errorcode == sqlite3.SQLITE_BUSY
                if not is_locked or time.monotonic() - begun >= self._seconds:
                    raise


def _shorten(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_WAIT_MS}")
    cursor.close()

"""Python imports this where its folder is in PYTHONPATH: each commit of the journal waits a while.

So a kill comes in between, and leaves nothing of what was to be written. Workers have it too.
"""

import os
import random
import sqlite3
import time
from typing import Any

_SECONDS = float(os.environ["SLOW_DISK_SECONDS"])
_connect = sqlite3.connect


class _Slow(sqlite3.Connection):
    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        if statement == "COMMIT":
            time.sleep(random.uniform(0, _SECONDS))
        return super().execute(statement, *parameters)


def _slow(path: Any, *words: Any, **options: Any) -> sqlite3.Connection:
    if str(path).endswith("journal.db"):
        options["factory"] = _Slow
    return _connect(path, *words, **options)


sqlite3.connect = _slow

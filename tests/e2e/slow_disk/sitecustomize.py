"""Python imports this where its folder is in PYTHONPATH: each `os.pwrite` waits a while before.

So a kill comes in between, and leaves nothing of what was to be written. Workers have it too.
"""

import os
import random
import time

_SECONDS = float(os.environ["SLOW_DISK_SECONDS"])
_write = os.pwrite


def _late(file: int, content: bytes, offset: int) -> int:
    time.sleep(random.uniform(0, _SECONDS))
    return _write(file, content, offset)


os.pwrite = _late

"""Lets a test look through what a process still holds: this folder is on its PYTHONPATH.

At SIGUSR2 a process writes to `$LIVE_MEMORY/PID` in which kinds of objects the bytes of
`$LIVE_MEMORY/needle` stand. What was freed is not looked at: no object leads to it.
"""

import gc
import os
import signal
from collections import Counter
from pathlib import Path

FOLDER = os.environ.get("LIVE_MEMORY", "")
TEXTS = (str, bytes, bytearray)
UNTRACKED = (dict, tuple, frozenset)
"""Containers that the collector may not list, since they hold nothing that it looks after."""


def find(needle: bytes) -> list[str]:
    """The kinds of the objects that hold a text with it, and how many there are of each."""
    gc.unfreeze()
    gc.collect()
    counts: Counter[str] = Counter()
    for owner in gc.get_objects():
        inside = [owner]
        while inside:
            for part in gc.get_referents(inside.pop()):
                if type(part) in TEXTS:
                    is_text = type(part) is str
                    content = part.encode("utf-8", "replace") if is_text else part
                    if needle in content:
                        counts[f"{type(owner).__module__}.{type(owner).__qualname__}"] += 1
                elif type(part) in UNTRACKED and not gc.is_tracked(part):
                    inside.append(part)
    return [f"{kind} {number}" for kind, number in sorted(counts.items())]


def look(*_: object) -> None:
    needle = bytes.fromhex(Path(FOLDER, "needle").read_text())
    path = Path(FOLDER, str(os.getpid()))
    path.with_suffix(".new").write_text("\n".join(find(needle)))
    path.with_suffix(".new").rename(path)


if FOLDER:
    signal.signal(signal.SIGUSR2, look)

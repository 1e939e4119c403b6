"""An engine that waits seconds for a slot, instead of a minute, and often looks for slots and
files."""

from engine.__main__ import main
from engine.backends.upstream.slots import loop

loop.REST_SECONDS = 3.0
loop.MAX_LOOK_SECONDS = 0.1
loop.WATCH_SECONDS = 0.1

if __name__ == "__main__":
    raise SystemExit(main([]))

"""An engine that waits a second for a slot, instead of a minute."""

from engine.__main__ import main
from engine.backends.upstream.slots import loop

loop.REST_SECONDS = 1.0

if __name__ == "__main__":
    raise SystemExit(main([]))

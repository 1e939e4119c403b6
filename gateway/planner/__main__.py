"""`python -m gateway.planner`: makes one plan.

Standard input is a Job in MessagePack. Standard output is lines of JSON. The gateway starts it as a
process of its own, with a deadline, and ends its whole group.
"""

import os
import resource
import signal
import sys
from time import monotonic

import msgspec

from gateway.base.errors import InvalidRequest
from gateway.planner.plan import plan
from gateway.planning.traffic import Job
from gateway.structs.plan import Line, PlanFailed, Planned, Progress

_PROGRESS_SECONDS = 0.2
NICENESS = 15
"""With it a plan gets a twentieth of a processor that a gateway and an engine want too."""
MAX_SECONDS = 200
MAX_BYTES = 6 * 2**30
"""Bounds of each process. They matter when the gateway is gone: its own deadline is sooner."""


def say(line: Line) -> None:
    """Write one line to standard output."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    # A group of its own can be ended as a whole. The session stays the gateway's: Linux shares a
    # processor between sessions first, and only then by niceness.
    os.setpgid(0, 0)
    os.nice(NICENESS)
    signal.alarm(MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    said_at = 0.0

    def tell(share: float) -> None:
        nonlocal said_at
        now = monotonic()
        if now - said_at >= _PROGRESS_SECONDS:
            said_at = now
            say(Progress(share=round(share, 3)))

    try:
        say(Planned(plan=plan(job, tell)))
    except InvalidRequest as error:
        say(PlanFailed(message=str(error), is_asked=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())

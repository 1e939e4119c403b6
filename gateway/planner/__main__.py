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
"""The planner's niceness. On a processor that a gateway and an engine use, a plan gets a
twentieth."""
MAX_SECONDS = 200
"""The most seconds of a plan. It matters if the gateway is gone, because its own deadline is
sooner."""
MAX_BYTES = 6 * 2**30
"""The most memory of each process of a plan, in bytes of address space."""


def say(line: Line) -> None:
    """Write one line to standard output."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    # The gateway can end a process group as a whole. The session stays the gateway's, because Linux
    # shares a processor between sessions first and by niceness only within each.
    os.setpgid(0, 0)
    os.nice(NICENESS)
    signal.alarm(MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    last_line_at = 0.0

    def tell(share: float) -> None:
        nonlocal last_line_at
        now = monotonic()
        if now - last_line_at >= _PROGRESS_SECONDS:
            last_line_at = now
            say(Progress(share=round(share, 3)))

    try:
        say(Planned(plan=plan(job, tell)))
    except InvalidRequest as error:
        say(PlanFailed(message=str(error), is_asked=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())

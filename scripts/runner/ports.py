"""Whether the programs' ports are free, and which are."""

import errno
import socket

from scripts.runner.options import ENGINES_ABOVE, GATEWAY_PORT, Options
from scripts.runner.plan import Program
from scripts.stack import HOST, StartError

FIRST_OTHER, LAST_OTHER, STEP = 9080, 60_080, 1000


def check_ports(programs: list[Program], options: Options) -> None:
    """Raises StartError, with a base port that is free, where a port can't be had."""
    refused = [(program, why) for program in programs if (why := refusal(program.port))]
    if not refused:
        return
    if any(why == errno.EACCES for _, why in refused):
        raise StartError("ports below 1024 are the system's; name a higher --port")
    taken = ", ".join(f"{program.port} (for the {program.name})" for program, _ in refused)
    others = free_base(options)
    instead = f", or take others: scripts/run --port {others}" if others else ""
    raise StartError(f"in use by another program: {taken}; stop what listens there{instead}")


def refusal(port: int) -> int:
    """The number of the error that listening on it would meet; 0 where it is free."""
    with socket.socket() as probe:
        # As servers do: a connection in TIME_WAIT from the last run is no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.errno or errno.EADDRINUSE
    return 0


def free_base(options: Options) -> int | None:
    """A `--port` whose ports nobody has now."""
    shift = [
        *range(options.gateways),
        *range(ENGINES_ABOVE, ENGINES_ABOVE + options.engines),
        options.ports.dashboard - options.ports.base,
    ]
    bases = (GATEWAY_PORT, *range(FIRST_OTHER, LAST_OTHER, STEP))
    return next((base for base in bases if not any(refusal(base + s) for s in shift)), None)

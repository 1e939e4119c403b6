"""Time across restarts: the wall clock, and the machine's own clock while it has not rebooted."""

import time
from pathlib import Path
from typing import NamedTuple, Protocol

FAVOUR_SECONDS = 60.0
AGREE_SECONDS = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Moment(NamedTuple):
    """`wall`: seconds since 1970. `boot`: seconds since the machine started, of `boot_id`."""

    wall: float
    boot: float
    boot_id: str


class WallClock(Protocol):
    def moment(self) -> Moment: ...


class SystemWallClock:
    """The machine's clocks. Where it has no boot clock, every process is a boot of its own."""

    def __init__(self) -> None:
        try:
            self._boot_id = _BOOT_ID.read_text().strip()
        except OSError:
            self._boot_id = f"process {time.time_ns()}"

    def moment(self) -> Moment:
        clock = getattr(time, "CLOCK_BOOTTIME", None)
        boot = time.monotonic() if clock is None else time.clock_gettime(clock)
        return Moment(time.time(), boot, self._boot_id)


class Elapsed(NamedTuple):
    """Seconds between two moments, and how far the wall clock was moved meanwhile."""

    seconds: float
    moved: float


def elapsed(then: Moment, now: Moment) -> Elapsed:
    """How much of a lifetime is over.

    Within one boot the two clocks must agree. Where the wall clock was moved, the reading that is
    better for the client counts, but at most FAVOUR_SECONDS of it. After a reboot there is only the
    wall clock; one that went back counts as no time.
    """
    wall = now.wall - then.wall
    if then.boot_id != now.boot_id or now.boot < then.boot:
        return Elapsed(max(wall, 0.0), min(wall, 0.0))
    boot = now.boot - then.boot
    if abs(wall - boot) <= AGREE_SECONDS:
        return Elapsed(boot, 0.0)
    return Elapsed(max(min(wall, boot), max(wall, boot) - FAVOUR_SECONDS, 0.0), wall - boot)

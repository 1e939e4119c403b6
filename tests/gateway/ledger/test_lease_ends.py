"""What metrics and conditions say of leases that ended early is what the ledger's records say."""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

from gateway.base.clock import Clock
from gateway.base.metrics import Metrics
from gateway.conditions.kinds import LULL_SECONDS, RECENT_SECONDS, Finding
from gateway.conditions.leases import LeaseEnds
from gateway.ledger.database import Ledger
from gateway.ledger.reads.leases import LeaseFates, lease_fates
from gateway.ledger.reads.sums import Range
from gateway.structs.fleet import ENDED_EARLY
from tests.gateway.ledger.test_epochs import ended, epoch_report
from tests.gateway.ledger.test_sums import START


@dataclass
class Looks:
    """A gateway that looks at a ledger, `minutes` after its start."""

    ledger: Ledger
    minutes: float = 0.0
    epoch: str | None = "a"
    has_engine: bool = True

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.ends = LeaseEnds(self._fates, self.metrics, Clock(self._wall, self._now))

    def _wall(self) -> datetime:
        return START + timedelta(minutes=self.minutes)

    def _now(self) -> float:
        return 60 * self.minutes

    async def _fates(self, of: Range) -> dict[str, LeaseFates]:
        answering = {"engine-0": self.epoch} if self.has_engine else {}
        return await lease_fates(self.ledger, of, answering)

    async def look(self, minutes: float, epoch: str | None = "a") -> list[Finding]:
        self.minutes = minutes
        self.epoch = epoch
        await self.ends.look()
        return list(self.ends.findings(self._now()))

    def counted(self) -> dict[str, float]:
        """The series of the counter; none of them exists before the first look."""
        series = "holdfast_gateway_leases_ended_total{"
        lines = [line for line in self.exposed() if line.startswith(series)]
        values = [line.removeprefix(f'{series}reason="').split('"} ') for line in lines]
        return {reason: float(value) for reason, value in values}

    def exposed(self) -> list[str]:
        return self.metrics.exposition().decode().splitlines()

    def not_known(self) -> float:
        name = "holdfast_gateway_leases_not_known "
        (line,) = [line for line in self.exposed() if line.startswith(name)]
        return float(line.removeprefix(name))


NONE = dict.fromkeys(("expired", "released", *ENDED_EARLY), 0.0)


@pytest.mark.anyio
async def test_nothing_is_said_before_the_ledger_was_read(ledger: Ledger) -> None:
    looks = Looks(ledger)
    assert looks.counted() == {}
    assert math.isnan(looks.not_known())
    assert await looks.look(0) == []
    assert looks.counted() == NONE
    assert looks.not_known() == 0


@pytest.mark.anyio
async def test_a_killed_engines_leases_are_not_known_then_lost_and_again(ledger: Ledger) -> None:
    """Twice in a row, and a gateway that starts in between counts as the others do."""
    looks = Looks(ledger)
    await looks.look(0)
    await ledger.record_epochs([epoch_report("a", 0, 3, granted=2)])
    assert await looks.look(3) == []
    assert looks.not_known() == 0
    assert await looks.look(4, None) == []
    assert looks.not_known() == 2
    assert looks.counted() == NONE
    await ledger.record_epochs([epoch_report("b", 3.5, 5, granted=3, ended=ended(expired=1))])
    (finding,) = await looks.look(5, "b")
    assert (finding.kind, finding.engine) == ("leases_ended_early", "engine-0")
    assert finding.cause == "2 lost in a restart"
    assert looks.not_known() == 0
    assert looks.counted() == NONE | {"expired": 1, "restart": 2}
    second = Looks(ledger)
    (second_finding,) = await second.look(5.5, "b")
    assert second_finding.cause == finding.cause
    await ledger.record_epochs([epoch_report("c", 5.5, 6)])
    (finding,) = await looks.look(6, "c")
    assert finding.cause == "4 lost in a restart"
    await second.look(6, "c")
    expected = NONE | {"expired": 1, "restart": 4}
    assert looks.counted() == second.counted() == expected
    # When no more come it is told as something that has ended, and then no more.
    assert (await looks.look(6.9, "c"))[0].ended is None
    (over,) = await looks.look(6 + LULL_SECONDS / 60, "c")
    assert (over.since, over.ended) == (5 * 60.0, 6 * 60.0)
    assert over.cause == finding.cause
    assert await looks.look(6 + RECENT_SECONDS / 60, "c") == []
    assert looks.counted() == expected
    # What was long ago when a gateway starts is counted, and is no news.
    assert await Looks(ledger).look(60, "c") == []


@pytest.mark.anyio
async def test_each_reason_is_told_but_what_an_operator_dropped_is_no_alarm(ledger: Ledger) -> None:
    looks = Looks(ledger)
    await ledger.record_epochs([epoch_report("a", 0, 1, granted=9)])
    await looks.look(1)
    dropped = epoch_report("a", 0, 2, granted=9, ended=ended(dropped=1, expired=1))
    await ledger.record_epochs([dropped])
    assert await looks.look(2) == []
    early = ended(dropped=1, expired=1, sacrificed=2, yielded=1, damaged=1)
    await ledger.record_epochs([epoch_report("a", 0, 3, granted=9, ended=early)])
    (finding,) = await looks.look(3)
    assert finding.cause == (
        "2 given up for running requests, 1 yielded to another workspace, 1 damaged on disk"
    )
    looks.has_engine = False
    (finding,) = await looks.look(4)
    assert "3 lost with an engine" in finding.cause
    expected = {name: float(count) for name, count in early.items()} | {"engine_lost": 3.0}
    assert looks.counted() == NONE | expected
    # It is back, as it was: no counter goes back.
    looks.has_engine = True
    await looks.look(5)
    assert looks.counted() == NONE | expected

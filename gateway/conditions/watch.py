"""The one list of what is wrong, and since when. A loop looks each second, so that beginnings and
ends are known to the second."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from engine.supervisor import Supervisor
from gateway.base.background import pause
from gateway.base.clock import Clock
from gateway.conditions import records
from gateway.conditions.engines import Increases, of_engine
from gateway.conditions.kinds import KINDS, Finding
from gateway.conditions.leases import LeaseEnds
from gateway.journal.audit import Audit
from gateway.journal.drain import Drain
from gateway.journal.lost import LostTurns
from gateway.journal.store import Journal
from gateway.ledger.identity import Identity
from gateway.ledger.sealed import Sealing
from gateway.routing.fleet import Fleet
from gateway.structs.conditions import Condition, ConditionKind

LOOK_SECONDS = 1.0
_ORDER = {"critical": 0, "warning": 1, "info": 2}


class _Lasting(NamedTuple):
    """A finding of the last look, with its times."""

    finding: Finding
    # When it began, in milliseconds since 1970.
    since_ms: int
    # When it began, in monotonic seconds.
    first_seen: float
    # When it ended, in milliseconds since 1970; None while it lasts.
    ended_ms: int | None


class Watch:
    """Remembers since when each finding lasts. Pure: it gets the findings and the time."""

    def __init__(self) -> None:
        self._lasting: dict[tuple[ConditionKind, str], _Lasting] = {}

    def take(self, findings: Iterable[Finding], now: float, wall_ms: int) -> None:
        """Take in what a look found. Findings of the look before that it lacks are over.

        `now` is in monotonic seconds, and `wall_ms` in milliseconds since 1970.
        """
        lasting = dict[tuple[ConditionKind, str], _Lasting]()
        for finding in findings:
            key = finding.kind, finding.about
            before = self._lasting.get(key)
            ended_ms = None
            if finding.ended is not None:
                ended_ms = wall_ms - round((now - finding.ended) * 1000)
            if before is not None:
                # Keep the end as it was first computed, so that a jump of the wall clock does not
                # move it.
                if before.finding.ended == finding.ended:
                    ended_ms = before.ended_ms
                lasting[key] = before._replace(finding=finding, ended_ms=ended_ms)
                continue
            began = now if finding.since is None else min(finding.since, now)
            since_ms = wall_ms - round((now - began) * 1000)
            lasting[key] = _Lasting(finding, since_ms, began, ended_ms)
        self._lasting = lasting

    def conditions(
        self, now: float, *, is_for_all: bool = False, with_new: bool = False
    ) -> list[Condition]:
        """The conditions that have lasted long enough to be told, the worst first.

        With `with_new` the others are there too. With `is_for_all` the list is as keys of one
        workspace may see it. `now` is in monotonic seconds.
        """
        conditions = list[Condition]()
        for finding, since_ms, first_seen, ended_ms in self._lasting.values():
            kind = KINDS[finding.kind]
            is_new = now - first_seen < kind.seconds
            if (is_new and not with_new) or (is_for_all and not kind.for_all):
                continue
            cause = finding.cause
            if is_for_all and finding.cause_for_all is not None:
                cause = finding.cause_for_all
            conditions.append(
                Condition(
                    kind=finding.kind,
                    severity=kind.severity,
                    about=finding.about,
                    engine=finding.engine,
                    state=kind.state if ended_ms is None else kind.past,
                    since_ms=since_ms,
                    ended_ms=ended_ms,
                    cause=cause,
                    remedy="" if is_for_all else kind.remedy,
                )
            )
        return sorted(conditions, key=lambda entry: (_ORDER[entry.severity], entry.since_ms))


class Conditions:
    """The conditions of this gateway and its engines."""

    def __init__(
        self,
        fleet: Fleet,
        journal: Journal,
        drain: Drain,
        ledger: Identity,
        audit: Audit,
        lost: LostTurns,
        sealing: Sealing,
        lease_ends: LeaseEnds,
        supervisor: Supervisor,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._journal = journal
        self._drain = drain
        self._ledger = ledger
        self._audit = audit
        self._lost = lost
        self._sealing = sealing
        self._lease_ends = lease_ends
        self._supervisor = supervisor
        self._clock = clock
        self._watch = Watch()
        self._increases = Increases()

    def now(self, *, is_for_all: bool = False, with_new: bool = False) -> list[Condition]:
        """Look, and return the conditions of this moment, the worst first. The keywords are those
        of `Watch.conditions`."""
        now = self._clock.monotonic()
        self._watch.take(self._findings(now), now, self._clock.wall_ms())
        return self._watch.conditions(now, is_for_all=is_for_all, with_new=with_new)

    def counts(self) -> dict[tuple[str, str], int]:
        """The number of conditions by kind and severity, with 0 for kinds without one."""
        numbers = Counter(condition.kind for condition in self.now())
        return {(name, kind.severity): numbers[name] for name, kind in KINDS.items()}

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until the gateway stops."""
        while not stopping.is_set():
            self.now()
            await pause(stopping, LOOK_SECONDS)

    def _findings(self, now: float) -> list[Finding]:
        engines = self._fleet.engines
        self._increases.keep({engine.name for engine in engines})
        conditions = [
            finding for engine in engines for finding in of_engine(engine, self._increases, now)
        ]
        wall_ms = self._clock.wall_ms()
        for engine in engines:
            purges = self._fleet.purges.of(engine.name)
            conditions += records.of_purges(purges, engine.purge_refusal, now, wall_ms)
        conditions += self._lease_ends.findings(now)
        conditions += records.of_loops(self._supervisor.failing)
        conditions += records.of_journal(self._journal)
        conditions += records.of_ledger(self._ledger, self._drain, self._journal)
        conditions += records.of_audit(self._audit)
        conditions += records.of_lost(self._lost)
        conditions += records.of_secret(self._sealing.problem)
        return conditions

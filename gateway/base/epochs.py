"""What a gateway knows of one epoch of an engine, as the ledger keeps it.

An epoch is one life of an engine's process. Its counters only grow. So the largest count that any
gateway has seen of an engine is the newest, and a repeated report adds nothing.
"""

from dataclasses import dataclass, field

from engine.protocol.reports import LEASE_ENDS, Counters, Description, PrefillSums


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """What an engine reported of one epoch. Moments are in Unix ms."""

    engine: str
    epoch: str
    model: str
    # The engine's word for what it computes on; empty where it reports none.
    device: str
    # Engines of one kind take about the same time for a prompt.
    kind: str
    # When the engine first and last answered.
    first_ms: int
    heard_ms: int
    # When the engine stopped answering; None while it answers.
    silent_ms: int | None = None
    granted: int = 0
    # Leases, by `LEASE_ENDS`.
    ended: dict[str, int] = field(default_factory=dict)
    # Leases of the epoch before that are readable again, and those that were in its store and are
    # lost.
    restored_leases: int = 0
    lost_leases: int = 0
    prefill_times: PrefillSums | None = None

    @property
    def counts(self) -> tuple[object, ...]:
        """The numbers that may be larger in a later report of the same epoch."""
        observations = 0 if self.prefill_times is None else self.prefill_times.observations
        fates = self.restored_leases, self.lost_leases
        return self.granted, *self.ended.values(), *fates, observations, self.silent_ms is None


def ended_of(counters: Counters) -> dict[str, int]:
    """The number of leases that ended, by how they ended."""
    return {reason: getattr(counters, f"leases_{reason}") for reason in LEASE_ENDS}


def kind_of(about: Description) -> str:
    """A text with all that decides how long an engine takes for a prompt of its model."""
    parts = about.backend, about.upstream or "", about.device, about.attention, about.kv_dtype
    return " ".join(part for part in parts if part)

"""What a gateway knows of one epoch of an engine, as the ledger keeps it.

An epoch is one life of an engine's process. Its counters only grow, so of several gateways that
follow one engine the largest that any has seen is the newest, and a repeated report adds nothing.
"""

from dataclasses import dataclass, field

from engine.protocol.reports import LEASE_ENDS, Counters, Description, PrefillSums


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """Moments are milliseconds since 1970. The engine answered first at `first_ms` and last at
    `heard_ms`; `silent_ms` is when it was first found not to answer since, None if it answers.
    `ended` counts leases by `LEASE_ENDS`. `restored_leases` of the epoch before are readable again,
    `lost_leases` were in its store and are not. `device` is the engine's word for what it computes
    on, empty where it tells none; engines of one `kind` take about the same time for a prompt."""

    engine: str
    epoch: str
    model: str
    device: str
    kind: str
    first_ms: int
    heard_ms: int
    silent_ms: int | None = None
    granted: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    restored_leases: int = 0
    lost_leases: int = 0
    prefill_times: PrefillSums | None = None

    @property
    def counts(self) -> tuple[object, ...]:
        """What a later report of the same epoch may have more of."""
        observations = 0 if self.prefill_times is None else self.prefill_times.observations
        lost = self.restored_leases, self.lost_leases
        return self.granted, *self.ended.values(), *lost, observations, self.silent_ms is None


def ended_of(counters: Counters) -> dict[str, int]:
    """The leases that ended, by how."""
    return {reason: getattr(counters, f"leases_{reason}") for reason in LEASE_ENDS}


def kind_of(about: Description) -> str:
    """What decides how long an engine takes for a prompt of its model, in one text."""
    parts = about.backend, about.upstream or "", about.device, about.attention, about.kv_dtype
    return " ".join(part for part in parts if part)

"""What a token of a prompt costs in time on each engine, by a fit over its own steps.

The fit is over everything that the engine has reported of the model. So no filter of a page changes
it, and the time of a whole is the sum of its parts' times.
"""

from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import select

from engine.protocol.reports import PrefillSums
from gateway.base.token_time import added, slope
from gateway.ledger.database import Ledger
from gateway.ledger.epochs import observed
from gateway.ledger.schema import EpochReportRow
from gateway.structs.usage import Avoided


class TokenTime(NamedTuple):
    """The time of one token."""

    seconds: float
    # Whether the engine says that a GPU took it.
    is_gpu: bool


class _EpochTimes(NamedTuple):
    """What one epoch of an engine reported."""

    model: str
    device: str
    sums: PrefillSums


class TokenTimes:
    """The time of a token by engine and model."""

    def __init__(self, by_engine: dict[str, list[_EpochTimes]]) -> None:
        self._by_engine = by_engine

    def of(self, engine: str | None, model: str) -> TokenTime | None:
        """None where it is not known. A name that is no model of the engine stands for the
        engine's only one."""
        epochs = self._by_engine.get(engine or "", [])
        of_model = [epoch for epoch in epochs if epoch.model == model]
        if not of_model and len({epoch.model for epoch in epochs}) == 1:
            of_model = epochs
        seconds = slope(added(epoch.sums for epoch in of_model))
        if seconds is None:
            return None
        devices = {epoch.device for epoch in of_model if epoch.device}
        return TokenTime(seconds, bool(devices) and "cpu" not in devices)


async def token_times(ledger: Ledger, name_of: Callable[[str], str]) -> TokenTimes:
    """The times of all engines. `name_of` gives the one name of an engine's model."""
    table = EpochReportRow
    columns = table.engine, table.model, table.device, table.prefill_times
    query = select(*columns).where(table.prefill_times.is_not(None))
    by_engine: dict[str, list[_EpochTimes]] = {}
    for row in await ledger.rows(query):
        sums = observed(row.prefill_times)
        by_engine.setdefault(row.engine, []).append(
            _EpochTimes(name_of(row.model), row.device, sums)
        )
    return TokenTimes(by_engine)


def avoided(engine: str | None, model: str, read_tokens: int, time: TokenTime | None) -> Avoided:
    """What reads of so many tokens avoided on an engine."""
    seconds = None if time is None else read_tokens * time.seconds
    return Avoided(
        engine=engine,
        model=model,
        prefill_tokens=read_tokens,
        seconds_per_token=None if time is None else time.seconds,
        prefill_seconds=seconds,
        gpu_hours=seconds / 3600 if seconds is not None and time and time.is_gpu else None,
    )

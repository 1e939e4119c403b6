"""A made-up month of turns, deterministic by its seed: what a gateway would have recorded.

Each turn is routed to an engine and looked up in that engine's memory (`memory.py`). It is timed at
the engine's rates (`serving.py`) and priced by the product's own price sheets. Reads, writes and
miss reasons are not drawn at random: they follow from TTLs, restarts and routing.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gateway.base.record import TurnRecord
from gateway.journal.charge import charge
from gateway.prices.book import PriceBook
from gateway.prices.sheets import PriceSheets
from gateway.sample.arrivals import Arrival, arrivals, day_of, start_of
from gateway.sample.cast import ENGINE_MODEL, MACHINES, PRICED_AS
from gateway.sample.memory import SampleCache
from gateway.sample.prompts import SamplePrompt, Talk, write
from gateway.sample.serving import serve

# Days on which the system prompts changed, so that everything is written anew.
_DEPLOYMENTS = (4, 11, 18, 25)
_ELSEWHERE = 0.02
_INSTANCE = "5a3b1e00"

Engines = dict[str, SampleCache]


def scope_of(workspace: str) -> str:
    """A scope that no installation's secret gives: it is for sample data only."""
    return f"{random.Random(workspace).getrandbits(128):032x}"  # noqa: S311 - names, no secret


def key_id_of(workspace: str, name: str) -> str:
    return f"key_{random.Random(f'{workspace}/{name}').getrandbits(64):016x}"  # noqa: S311


@dataclass(slots=True)
class Month:
    """About `num_turns` turns of the 30 days before `until` (aware UTC). Iterate once."""

    until: datetime
    num_turns: int
    seed: int
    prices: PriceSheets | PriceBook
    _talks: dict[tuple[str, int], Talk] = field(default_factory=dict)

    def records(self) -> Iterator[TurnRecord]:
        """In order of time."""
        chance = random.Random(self.seed)  # noqa: S311 - repeatable on purpose
        engines = {memory.machine.name: memory for memory in self._memories(chance)}
        for arrival in arrivals(self.until, self.num_turns, chance):
            yield self._record(arrival, engines, chance)

    def _memories(self, chance: random.Random) -> Iterator[SampleCache]:
        for machine in MACHINES:
            downs = [
                (start, start + int(minutes * 60_000))
                for day, hour, minutes in machine.restarts
                for start in [start_of(self.until, day, hour)]
            ]
            epochs = [f"{chance.getrandbits(128):032x}" for _ in range(len(downs) + 1)]
            yield SampleCache(machine, start_of(self.until, machine.first_day, 0), downs, epochs)

    def _record(self, arrival: Arrival, engines: Engines, chance: random.Random) -> TurnRecord:
        app = arrival.app
        talk = self._talks.setdefault((app.name, arrival.talk), Talk())
        is_compacted = talk.ask(arrival, chance.randint(*app.question))
        version = sum(day_of(arrival.ms, self.until) >= day for day in _DEPLOYMENTS)
        written = write(arrival, talk, version, scope_of(app.workspace))
        record = _opened(arrival, written, f"{chance.getrandbits(80):020x}")
        place = self._route(arrival, written, engines, chance)
        if place is None:
            record.outcome, record.duration_seconds = "overloaded_error", 0.002
        else:
            held = {
                name: engine.holds(written.keys, arrival.ms)
                for name, engine in engines.items()
                if engine.is_up(arrival.ms) and engine.epoch_at(arrival.ms)
            }
            serve(record, arrival, written, place, chance)
            own = held.pop(place.machine.name)
            _refine(record, is_compacted, max(held.values(), default=0) > own)
            if record.first_token_seconds is not None:
                record.available_tokens = max([own, *held.values()])
                record.captured_tokens = own
            talk.answer(arrival, record.output_tokens)
        priced_as = PRICED_AS[app.model]
        if priced_as is not None:
            charge(record, self.prices.find(priced_as, record.opened_at.date()))
        return record

    def _route(
        self, arrival: Arrival, written: SamplePrompt, engines: Engines, chance: random.Random
    ) -> SampleCache | None:
        """Mostly the engine that holds most of the prompt; None while no engine is up."""
        app, ms = arrival.app, arrival.ms
        up = [
            e
            for e in engines.values()
            if e.machine.serves == ENGINE_MODEL[app.model] and e.is_up(ms)
        ]
        if not up:
            return None
        holder = max(up, key=lambda engine: engine.holds(written.keys, ms))
        if arrival.turn == 0 or not holder.holds(written.keys, ms):
            # Talks are spread over the engines; so are the prompts of applications without talks.
            holder = up[(arrival.talk if app.talk_turns > 1 else arrival.prompt) % len(up)]
        return holder if chance.random() > _ELSEWHERE else chance.choice(up)


def _opened(arrival: Arrival, written: SamplePrompt, suffix: str) -> TurnRecord:
    app = arrival.app
    return TurnRecord(
        id=f"msg_{_INSTANCE}{suffix}",
        instance=_INSTANCE,
        workspace=app.workspace,
        key_id=key_id_of(app.workspace, arrival.key),
        model=app.model,
        stream=app.rhythm != "night",
        opened_at=datetime.fromtimestamp(arrival.ms / 1000, UTC),
        engine_model=ENGINE_MODEL[app.model],
        dialect=app.dialect,
        prefix=written.marks[-1].key if written.marks else None,
        prefix_ttl=written.marks[-1].ttl if written.marks else None,
        fingerprint=written.fingerprint(arrival, scope_of(app.workspace)),
    )


def _refine(record: TurnRecord, is_compacted: bool, is_elsewhere: bool) -> None:
    """Refine the miss reason as the gateway does: only where the engine knows no better one."""
    if record.miss_reason != "cold":
        return
    if is_elsewhere:
        record.miss_reason = "routed_elsewhere"
    elif is_compacted:
        record.miss_reason = "messages_changed"

"""The sample month's turns: which engine gets each, and what became of it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from engine.protocol import Role
from gateway.base.epochs import EpochReport
from gateway.base.record import TurnRecord
from gateway.journal.drain import charge
from gateway.prices.files import PriceBook
from gateway.prices.price import PriceSheets
from scripts.sample.answers import serve
from scripts.sample.arrivals import Arrival, arrivals, day_of, version_on
from scripts.sample.cache import SampleCache
from scripts.sample.cast import ENGINE_MODEL, MACHINES, PRICED_AS
from scripts.sample.prompt import SamplePrompt

# The share of turns that another engine gets than the one that holds most.
_ELSEWHERE = 0.02
_INSTANCE = "5a3b1e00"


def scope_of(workspace: str) -> str:
    """A scope that no installation's secret gives: it is for sample data only."""
    return f"{random.Random(workspace).getrandbits(128):032x}"


def key_id_of(workspace: str, name: str) -> str:
    return f"key_{random.Random(f'{workspace}/{name}').getrandbits(64):016x}"


@dataclass(slots=True)
class Month:
    """About `num_turns` turns of the 30 days before `until` (aware UTC). Iterate once."""

    until: datetime
    num_turns: int
    seed: int
    prices: PriceSheets | PriceBook
    _talks: dict[tuple[str, int], list[tuple[Role, str, int]]] = field(default_factory=dict)
    """The messages of a talk so far: role, stand-in text and tokens."""
    _engines: list[SampleCache] = field(default_factory=list)

    def records(self) -> Iterator[TurnRecord]:
        """The turns in order of time."""
        chance = random.Random(self.seed)
        self._engines = [SampleCache(machine, self.until, chance) for machine in MACHINES]
        for arrival in arrivals(self.until, self.num_turns, chance):
            yield self._record(arrival, self._engines, chance)

    def epoch_reports(self) -> Iterator[EpochReport]:
        """What became of the leases of the turns that `records` gave, which are all needed."""
        until_ms = int(self.until.timestamp() * 1000)
        for engine in self._engines:
            yield from engine.epoch_reports(until_ms)

    def _record(
        self, arrival: Arrival, engines: list[SampleCache], chance: random.Random
    ) -> TurnRecord:
        app = arrival.app
        ms = arrival.ms
        scope = scope_of(arrival.app.workspace)
        turn = f"{arrival.talk}.{arrival.turn}"
        talk = self._talks.setdefault((app.name, arrival.talk), [])
        talk.append(("user", f"question {turn}", chance.randint(*app.question)))
        version = version_on(day_of(ms, self.until))
        prompt = SamplePrompt(arrival, talk, version, scope)
        record = TurnRecord(
            id=f"msg_{_INSTANCE}{chance.getrandbits(80):020x}",
            instance=_INSTANCE,
            workspace=app.workspace,
            key_id=key_id_of(app.workspace, arrival.key),
            model=app.model,
            stream=app.rhythm != "night",
            opened_at=datetime.fromtimestamp(ms / 1000, UTC),
            engine_model=ENGINE_MODEL[app.model],
            dialect=app.dialect,
            prefix=prompt.marks[-1].key if prompt.marks else None,
            prefix_ttl=prompt.marks[-1].ttl if prompt.marks else None,
            fingerprint=prompt.fingerprint(),
        )
        place = self._route(arrival, prompt, engines, chance)
        if place is None:
            record.outcome = "overloaded_error"
            record.duration_seconds = 0.002
        else:
            tokens_by_engine = {
                engine.machine.name: engine.holds(prompt.keys, ms)
                for engine in engines
                if engine.is_up(ms) and engine.epoch_at(ms)
            }
            serve(record, arrival, prompt, place, chance)
            machine_entries = tokens_by_engine[place.machine.name]
            most = max(tokens_by_engine.values())
            # As in the gateway, this reason holds only if the engine knows no better one.
            if record.miss_reason == "cold" and most > machine_entries:
                record.miss_reason = "routed_elsewhere"
                record.marks = [
                    msgspec.structs.replace(mark, missed="routed_elsewhere")
                    if mark.missed == "cold"
                    else mark
                    for mark in record.marks or ()
                ]
            if record.first_token_seconds is not None:
                record.available_tokens = most
                record.captured_tokens = machine_entries
            talk.append(("assistant", f"answer {turn}", record.output_tokens))
        priced_as = PRICED_AS[app.model]
        if priced_as is not None:
            charge(record, self.prices.find(priced_as, record.opened_at.date()))
        return record

    def _route(
        self,
        arrival: Arrival,
        prompt: SamplePrompt,
        engines: list[SampleCache],
        chance: random.Random,
    ) -> SampleCache | None:
        """Mostly the engine that holds most of the prompt; None while no engine is up."""
        app = arrival.app
        ms = arrival.ms
        model = ENGINE_MODEL[arrival.app.model]
        up = [cache for cache in engines if cache.machine.serves == model and cache.is_up(ms)]
        if not up:
            return None
        holder = max(up, key=lambda engine: engine.holds(prompt.keys, ms))
        if arrival.turn == 0 or not holder.holds(prompt.keys, ms):
            # Talks are spread over the engines; so are the prompts of applications without talks.
            holder = up[(arrival.talk if app.talk_turns > 1 else arrival.prompt) % len(up)]
        return holder if chance.random() > _ELSEWHERE else chance.choice(up)

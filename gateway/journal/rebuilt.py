"""Makes turns from engines' counts, where nothing else is left of them.

An engine keeps a request's final counts until a gateway acknowledges them, so they outlive a lost
journal. They say the tokens, the engine and, by the scope, the workspace. The key, the time and the
client's status are lost. So the key is `unknown`, and the time is that at which the record is made.
Pure.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from engine.protocol import FinalCounts
from gateway.base.record import MODEL_CHARACTERS, TurnRecord, turn_of
from gateway.base.row_ids import is_try

OUTCOME = "gateway_lost"
UNKNOWN = "unknown"


class Counted(NamedTuple):
    """The final counts of one request at one engine."""

    # The engine's name.
    engine: str
    final: FinalCounts


def last_attempts(counts: Iterable[Counted]) -> dict[str, Counted]:
    """The counts of each turn's last request, by the turn's id; earlier ones are not charged. Tries
    of batches' rows are left out, because a row runs again."""
    last: dict[str, Counted] = {}
    for counted in counts:
        turn_id, attempt = turn_of(counted.final.request_id)
        if is_try(turn_id):
            continue
        earlier = last.get(turn_id)
        if earlier is None or attempt > turn_of(earlier.final.request_id)[1]:
            last[turn_id] = counted
    return last


@dataclass(frozen=True, slots=True)
class Rebuilder:
    """Makes records of turns of which only counts are left."""

    # Gives a workspace's scope at engines.
    scope_of: Callable[[str], str]
    # Gives an engine's model, by the engine's name.
    model_of: Callable[[str], str]
    # Gives the id of a model's price.
    price_of: Callable[[str], str | None]
    wall: Callable[[], datetime]

    def records(self, counted: Iterable[Counted], workspaces: Collection[str]) -> list[TurnRecord]:
        """A record for each of the counts, not charged yet. The workspace of an unknown scope is
        `unknown`."""
        by_scope = {self.scope_of(name): name for name in workspaces}
        return [self._record(entry, by_scope.get(entry.final.scope)) for entry in counted]

    def _record(self, counted: Counted, workspace: str | None) -> TurnRecord:
        final = counted.final
        turn_id, attempt = turn_of(final.request_id)
        model = self.model_of(counted.engine)
        record = TurnRecord(
            id=turn_id,
            attempt=attempt,
            instance=instance_of(turn_id),
            workspace=workspace or UNKNOWN,
            key_id=UNKNOWN,
            model=model[:MODEL_CHARACTERS],
            engine=counted.engine,
            engine_model=model,
            epoch=final.epoch,
            stream=False,
            opened_at=self.wall(),
            outcome=OUTCOME,
            stop_reason=final.reason,
            output_tokens=final.output_tokens,
            thinking_tokens=final.thinking_tokens,
            price=self.price_of(model),
        )
        if final.usage is not None:
            record.take_usage(final.usage)
        return record


def instance_of(turn_id: str) -> str:
    """The instance of the gateway whose turn it is."""
    return turn_id[len("msg_") : len("msg_") + 8]

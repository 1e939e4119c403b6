"""The record of one turn, as the journal keeps it and the ledger stores it."""

from datetime import datetime

import msgspec

from engine.protocol import InputUsage
from gateway.structs.usage import NOT_DELIVERED, TurnMark

# The width of the ledger's column.
MODEL_CHARACTERS = 128
CLIENT_LEFT = "client_disconnect"
_ERROR = 400


class RowTry(msgspec.Struct, kw_only=True):
    """A try of a batch's row. `id` is its own at the journal and at engines (`row_ids.py`).
    `status` and `result` (compressed and encrypted) are how the row ends; None while it has not
    ended, and where it is to run again."""

    id: str
    batch: str
    position: int
    status: str | None = None
    result: bytes | None = None


class TurnRecord(InputUsage, kw_only=True, omit_defaults=True):
    """One turn, written at the opening and again at the close. `outcome` is a finish reason of the
    engine, or why there is none. Counts of a turn that never started are 0, but see `take_prefill`.
    Money is in nano-dollars, None without a price. `fingerprint` is packed; `num_removed` counts
    nonces that were left out. `prefix` (16 hex digits, keyed by scope) names the deepest prefix
    that the client marked. `stop_reason` is the engine's, also where a client left. Its
    `queue_seconds`, `prefill_seconds` and `decode_seconds` are None where it told none. `attempt`
    numbers the engines that the turn was sent to; `engine` is the last. `available_tokens` were
    held by the engine that held most, `captured_tokens` by the chosen one; None where the turn
    never started. `status` None: no response was sent. `first_leg` is what another engine told of
    the prompt that it prefilled for this one: its classes are the turn's. `is_first_leg`: this
    attempt is such a prefill, which a client that leaves pays. `content` is one of
    `KEPT_CONTENTS`, None where the workspace keeps none. `leases_granted` counts those of the
    engine's epoch up to this turn. `row`: the turn is that of a batch's row, and this a try
    of it. `marks` are its breakpoints; None where its engine told nothing of each. A new field must
    have a default, because a journal may hold records of an earlier version."""

    id: str
    instance: str
    workspace: str
    key_id: str
    model: str
    stream: bool
    opened_at: datetime
    engine: str | None = None
    engine_model: str | None = None
    epoch: str | None = None
    outcome: str = "open"
    price: str | None = None
    output_tokens: int = 0
    thinking_tokens: int = 0
    miss_reason: str | None = None
    first_token_seconds: float | None = None
    duration_seconds: float | None = None
    cost: int | None = None
    cost_without_cache: int | None = None
    num_removed: int = 0
    fingerprint: bytes | None = None
    dialect: str | None = None
    prefix: str | None = None
    prefix_ttl: str | None = None
    stop_reason: str | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    attempt: int = 1
    available_tokens: int | None = None
    captured_tokens: int | None = None
    http_request_id: str | None = None
    user_agent: str | None = None
    name: str | None = None
    status: int | None = None
    error: str | None = None
    approximate: str | None = None
    leases_granted: int = 0
    first_leg: InputUsage | None = None
    is_first_leg: bool = False
    row: RowTry | None = None
    content: str | None = None
    marks: list[TurnMark] | None = None

    @property
    def journal_id(self) -> str:
        """The id in the journal, by which engines know the turn too."""
        return self.id if self.row is None else self.row.id

    @property
    def request_id(self) -> str:
        """The id of this attempt at its engine. Each attempt is a request of its own."""
        return self.journal_id if self.attempt == 1 else f"{self.journal_id}.{self.attempt}"

    @property
    def is_given_up(self) -> bool:
        """Whether this is a try of a row that did not end it. The ledger gets no turn of it."""
        return self.row is not None and self.row.result is None

    def begin_anew(self) -> None:
        """Begin the next attempt: clear the counts of the one before."""
        self.attempt += 1
        self.is_first_leg = False
        self.epoch = self.miss_reason = self.fingerprint = self.approximate = None
        self.marks = None
        self.first_token_seconds = self.queue_seconds = self.prefill_seconds = None
        self.available_tokens = self.captured_tokens = None
        self.thinking_tokens = self.leases_granted = 0
        self.take_usage(InputUsage())

    def take_prefill(self, num_tokens: int) -> None:
        """Count what an engine computed of a prompt whose answer never began. A client that left
        pays it as uncached input. Nobody pays it where the engine or the gateway failed."""
        first = self.first_leg
        self.computed_tokens = num_tokens + (first.computed_tokens if first else 0)
        if self.outcome != CLIENT_LEFT:
            return
        if first is None:
            self.input_tokens = num_tokens
        else:
            self.take_usage(msgspec.structs.replace(first, computed_tokens=self.computed_tokens))

    @property
    def is_undelivered(self) -> bool:
        """Whether the client got an error in place of an answer, or nothing as the row runs
        again."""
        return self.is_given_up or (self.status is not None and self.status >= _ERROR)

    def withhold(self) -> None:
        """Charge nothing: the answer was not delivered."""
        self.price = NOT_DELIVERED
        self.cost = self.cost_without_cache = 0

    def over_legs(self, usage: InputUsage) -> InputUsage:
        """The turn's usage, where its engine told `usage`. A token that another engine prefilled is
        of the class that it had there; what this engine read was written for this turn. Computed
        tokens of both count."""
        first = self.first_leg
        if first is None:
            return usage
        computed = first.computed_tokens + usage.computed_tokens
        return msgspec.structs.replace(first, computed_tokens=computed)

    def take_usage(self, usage: InputUsage) -> None:
        for name in InputUsage.__struct_fields__:
            setattr(self, name, getattr(usage, name))


def turn_of(request_id: str) -> tuple[str, int]:
    """Split a `TurnRecord.request_id` into turn and attempt. An id without a number is attempt
    1."""
    turn_id, _, attempt = request_id.partition(".")
    return turn_id, int(attempt) if attempt.isdecimal() else 1

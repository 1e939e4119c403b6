"""The record of one turn, as the journal and the ledger store it."""

from datetime import datetime

import msgspec

from engine.protocol import InputUsage
from gateway.structs.usage import NOT_DELIVERED, TurnMark

MODEL_CHARACTERS = 128
"""The width of the ledger's column."""
CLIENT_DISCONNECT = "client_disconnect"
_ERROR = 400


class RowTry(msgspec.Struct, kw_only=True):
    """A try of a batch's row."""

    # The try's own id, at the journal and at engines (`row_ids.py`).
    id: str
    batch: str
    position: int
    # The type of the row's result; None while the row has not ended, and where it is to run again.
    status: str | None = None
    # The row's result, compressed and encrypted; None where `status` is.
    result: bytes | None = None


class TurnRecord(InputUsage, kw_only=True, omit_defaults=True):
    """One turn, written at its opening and again at its close.

    A new field must have a default: a journal may hold records of an earlier version. A turn that
    never started has counts of 0, except those of `take_prefill`.
    """

    id: str
    instance: str
    workspace: str
    key_id: str
    model: str
    stream: bool
    opened_at: datetime
    # The engine of the last attempt.
    engine: str | None = None
    # The name of the model at that engine.
    engine_model: str | None = None
    # The epoch of that engine.
    epoch: str | None = None
    # A finish reason of the engine, or why there is none.
    outcome: str = "open"
    price: str | None = None
    output_tokens: int = 0
    thinking_tokens: int = 0
    # A `GatewayMissReason`. A record of another version may have another word.
    miss_reason: str | None = None
    first_token_seconds: float | None = None
    duration_seconds: float | None = None
    # The cost in nano-dollars; None without a price.
    cost: int | None = None
    # The cost of the same tokens without a cache, in nano-dollars.
    cost_without_cache: int | None = None
    # How many nonces were left out of the prompt.
    num_removed: int = 0
    # The packed fingerprint of the prompt (`prompt/fingerprint.py`).
    fingerprint: bytes | None = None
    dialect: str | None = None
    # The name of the deepest breakpoint, of the client or of an automatic policy: 16 hex digits,
    # keyed by the scope.
    prefix: str | None = None
    prefix_ttl: str | None = None
    # The engine's stop reason, also where the client left.
    stop_reason: str | None = None
    # The engine's times; None where it reported none.
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    # How many engines the turn was sent to so far.
    attempt: int = 1
    # The most tokens of the prompt that any engine held; None where the turn never started.
    available_tokens: int | None = None
    # The tokens of the prompt that the chosen engine held; None where the turn never started.
    captured_tokens: int | None = None
    http_request_id: str | None = None
    user_agent: str | None = None
    name: str | None = None
    # The HTTP status; None where no response was sent.
    status: int | None = None
    error: str | None = None
    approximate: str | None = None
    # The leases that the engine's epoch had granted up to this turn.
    leases_granted: int = 0
    # The usage at another engine that prefilled the prompt for this one. It decides the turn's
    # token classes.
    first_leg: InputUsage | None = None
    # Whether this attempt is such a prefill. A client that leaves pays for it.
    is_first_leg: bool = False
    # The try of a batch's row, where the turn is such a row's.
    row: RowTry | None = None
    # One of `KEPT_CONTENTS`; None where the workspace stores none.
    content: str | None = None
    # The breakpoints; None where the engine did not report them.
    marks: list[TurnMark] | None = None

    @property
    def journal_id(self) -> str:
        """The id in the journal and at engines."""
        return self.id if self.row is None else self.row.id

    @property
    def request_id(self) -> str:
        """The id of this attempt at its engine. Each attempt is a request of its own."""
        return self.journal_id if self.attempt == 1 else f"{self.journal_id}.{self.attempt}"

    @property
    def is_given_up(self) -> bool:
        """Whether this is a try that did not end its row. The ledger gets no turn of it."""
        return self.row is not None and self.row.result is None

    def begin_anew(self) -> None:
        """Begin the next attempt: clear what the one before has set."""
        self.attempt += 1
        self.is_first_leg = False
        self.epoch = None
        self.miss_reason = None
        self.fingerprint = None
        self.approximate = None
        self.marks = None
        self.first_token_seconds = None
        self.queue_seconds = None
        self.prefill_seconds = None
        self.available_tokens = None
        self.captured_tokens = None
        self.thinking_tokens = 0
        self.leases_granted = 0
        self.take_usage(InputUsage())

    def take_prefill(self, num_tokens: int) -> None:
        """Count what an engine computed of a prompt whose answer never began. A client that left
        pays it as uncached input. Nobody pays it where the engine or the gateway failed."""
        leg = self.first_leg
        self.computed_tokens = num_tokens + (leg.computed_tokens if leg else 0)
        if self.outcome != CLIENT_DISCONNECT:
            return
        if leg is None:
            self.input_tokens = num_tokens
        else:
            self.take_usage(msgspec.structs.replace(leg, computed_tokens=self.computed_tokens))

    @property
    def is_undelivered(self) -> bool:
        """Whether the client got no answer: an error, or nothing because the row runs again."""
        return self.is_given_up or (self.status is not None and self.status >= _ERROR)

    def withhold(self) -> None:
        """Charge nothing: the answer was not delivered."""
        self.price = NOT_DELIVERED
        self.cost = 0
        self.cost_without_cache = 0

    def over_legs(self, usage: InputUsage) -> InputUsage:
        """The turn's usage, where its last engine reported `usage`.

        Where another engine prefilled the prompt, each token has the class that it had there: what
        the last engine read was written for this turn. Computed tokens of both engines count.
        """
        leg = self.first_leg
        if leg is None:
            return usage
        computed = leg.computed_tokens + usage.computed_tokens
        return msgspec.structs.replace(leg, computed_tokens=computed)

    def take_usage(self, usage: InputUsage) -> None:
        """Set all token classes."""
        for name in InputUsage.__struct_fields__:
            setattr(self, name, getattr(usage, name))


def turn_of(request_id: str) -> tuple[str, int]:
    """Split a `TurnRecord.request_id` into the turn and the attempt, from 1."""
    turn_id, _, attempt = request_id.partition(".")
    return turn_id, int(attempt) if attempt.isdecimal() else 1

"""Copies closed turns from the journal to the ledger, exactly once, then acknowledges the engine.

The order makes it safe: insert, acknowledge, forget. After a crash between two of them the insert
is repeated, and a repeated insert changes nothing. The turn of a batch's row ends the row in the
same transaction. A try that did not end its row leaves the journal and has no turn in the ledger.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import date

from gateway.base.background import pause
from gateway.base.errors import GatewayError, LedgerRefused
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal.store import Journal
from gateway.journal.table import LOST, REFUSED
from gateway.prices.files import PriceBook
from gateway.prices.price import NanoDollars, Price, PriceSheets
from gateway.prompt.ask import Ask


def charge(record: TurnRecord, price: Price | None) -> None:
    """Price the counted tokens. Without a price the cost stays None."""
    if price is not None:
        cost = price.cost(record, record.output_tokens)
        record.price = price.id
        record.cost = cost.actual
        record.cost_without_cache = cost.without_cache


class Billing:
    """Prices each turn that ends, counts it in the metrics once, and then calls `charged`."""

    def __init__(
        self,
        prices: PriceSheets | PriceBook,
        metrics: Metrics,
        charged: Callable[[TurnRecord], None] = lambda record: None,
    ) -> None:
        self.prices = prices
        self.metrics = metrics
        self.charged = charged

    def charge(self, record: TurnRecord) -> None:
        """Price a turn and count it."""
        self.price(record)
        self.count(record)

    def price(self, record: TurnRecord) -> None:
        """Price a turn by its engine's counts. An answer that the client did not get is free."""
        if record.first_leg is not None and record.epoch is None:
            record.take_prefill(0)  # the engine that was to answer reported nothing
        # The record is opened with the model whose price applies. Pricing replaces it by the id.
        model = (record.price or record.model).split("@")[0]
        charge(record, self.prices.find(model, record.opened_at.date()))
        if record.is_undelivered:
            record.withhold()

    def count(self, record: TurnRecord) -> None:
        """Count a priced turn. A try of a row that runs again does not count as a turn."""
        if not record.is_given_up:
            self.metrics.count_turn(record)
        if record.num_removed and not record.is_given_up:
            self.metrics.count("removed_nonces", amount=record.num_removed)
        self.charged(record)

    def most(self, ask: Ask, on: date) -> NanoDollars:
        """The most that the turn can cost, by the estimated tokens of its prompt; 0 without a
        price."""
        price = self.prices.find((ask.model.price or ask.model.id).split("@")[0], on)
        return NanoDollars(0) if price is None else price.most(ask.prompt_tokens, ask.max_output)


Insert = Callable[[Sequence[TurnRecord]], Awaitable[None]]
"""Inserts closed turns. Turns that the ledger has already stay as they are."""
EndRows = Callable[[Sequence[TurnRecord]], Awaitable[set[str]]]
"""Inserts turns of batches' rows and ends the rows. Returns the ids of the turns with which this
gateway ended a row."""
Known = Callable[[Sequence[str]], Awaitable[set[str]]]
"""Returns those of the turns that the ledger has."""
_BATCH = 200
"""The most turns of one step. Preparing them does not hold up the event loop for long."""
_IDLE_SECONDS = 0.25
_GATHER_SECONDS = 0.5
"""The pause while turns come. A step costs 1.4 ms of CPU whatever its size, and a turn 50 us."""
_MAX_BACKOFF_SECONDS = 5.0


@dataclass(slots=True)
class Drain:
    """Moves closed turns from the journal to the ledger."""

    journal: Journal
    insert: Insert
    acknowledge: Callable[[str, list[str]], Awaitable[None]]
    metrics: Metrics
    # Tells which turns the ledger has.
    known: Known | None = None
    # Without it turns of batches' rows stay in the journal.
    end_rows: EndRows | None = None
    # Whether a first step was made.
    has_looked: bool = False
    # Why the last step failed; None where it did not.
    problem: str | None = None
    # Whether the last step failed, or left turns in the journal.
    is_behind: bool = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until stopping, and once more then, so that a clean stop leaves an empty journal."""
        backoff = _IDLE_SECONDS
        is_last = False
        while not is_last:
            is_last = stopping.is_set()
            try:
                # A look into the journal takes a trip to its thread, so it is left out where there
                # is nothing to move. The last one is always made: closes may be on their way.
                has_nothing = self.has_looked and not (is_last or self.journal.num_closed)
                num_moved = 0 if has_nothing else await self.step()
                backoff = _IDLE_SECONDS
                rest = _GATHER_SECONDS if num_moved else _IDLE_SECONDS
                self.problem = None
                self.is_behind = num_moved >= _BATCH
            except GatewayError as error:
                self.metrics.count("drain_failures")
                self.problem = str(error)
                self.is_behind = True
                get_logger("drain").warning("drain_failed", error=str(error), retry_seconds=backoff)
                num_moved = 0
                rest = backoff
                backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)
            if num_moved < _BATCH:
                await pause(stopping, rest)

    async def step(self) -> int:
        """Move one batch; return how many turns it held."""
        if not self.has_looked:
            # `recover --instance` may have inserted turns that were lost here.
            lost = await self.journal.set_aside_turns(LOST)
            if lost and self.known is not None:
                await self.journal.found(sorted(await self.known(lost)))
            self.has_looked = True
        turns = await self.journal.closed_turns(_BATCH)
        if not turns:
            return 0
        given_up = [turn for turn in turns if turn.is_given_up]
        if given_up:
            await self._acknowledge(given_up)
            await self.journal.drop([turn.journal_id for turn in given_up])
        rows = [turn for turn in turns if turn.row is not None and not turn.is_given_up]
        stored = await self._store([turn for turn in turns if turn.row is None])
        if stored:
            await self._acknowledge(stored)
            await self.journal.forget([turn.journal_id for turn in stored])
        if rows and self.end_rows is not None:
            await self._end(rows, self.end_rows)
        return len(turns)

    async def _acknowledge(self, turns: list[TurnRecord]) -> None:
        by_engine: dict[str, list[str]] = {}
        for turn in turns:
            if turn.engine:
                by_engine.setdefault(turn.engine, []).append(turn.request_id)
        for name, request_ids in by_engine.items():
            try:
                await self.acknowledge(name, request_ids)
            except GatewayError as error:  # the reconciler does it later
                get_logger("drain").warning("ack_failed", engine=name, error=str(error))

    async def _end(self, rows: list[TurnRecord], end_rows: EndRows) -> None:
        """End rows of batches. A row that another gateway ended first is counted there."""
        try:
            stored_ids = await end_rows(rows)
        except LedgerRefused as error:
            if len(rows) == 1:
                await self._set_aside(rows[0], error)
                return
            for turn in rows:
                await self._end([turn], end_rows)
            return
        await self._acknowledge(rows)
        await self.journal.drop([turn.journal_id for turn in rows if turn.id not in stored_ids])
        await self.journal.forget([turn.journal_id for turn in rows if turn.id in stored_ids])

    async def _set_aside(self, turn: TurnRecord, error: LedgerRefused) -> None:
        get_logger("drain").error(
            "turn_set_aside",
            turn=turn.id,
            request_id=turn.http_request_id,
            error=repr(error.__cause__),
        )
        await self.journal.set_aside([turn.journal_id], REFUSED)
        self.metrics.count("turns_set_aside")

    async def _store(self, turns: list[TurnRecord]) -> list[TurnRecord]:
        """Insert the turns; return those that are in the ledger now. A turn that the ledger can't
        hold is set aside in the journal, so that it does not block others."""
        if not turns:
            return []
        try:
            await self.insert(turns)
        except LedgerRefused as error:
            if len(turns) > 1:
                # One of them was refused, so each is tried alone.
                stored: list[TurnRecord] = []
                for turn in turns:
                    stored += await self._store([turn])
                return stored
            await self._set_aside(turns[0], error)
            return []
        return turns

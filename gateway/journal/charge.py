"""A turn's tokens and cost, from the engine's counts. The counts are never adjusted."""

from collections.abc import Callable
from datetime import date

from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.prices.files import PriceBook
from gateway.prices.money import NanoDollars
from gateway.prices.price import Price, PriceSheets
from gateway.prompt.ask import Ask


def charge(record: TurnRecord, price: Price | None) -> None:
    """Price the counted tokens. Without a price the cost stays None."""
    if price is None:
        return
    cost = price.cost(record, record.output_tokens)
    record.price = price.id
    record.cost, record.cost_without_cache = cost.actual, cost.without_cache


class Billing:
    """Prices a closed turn and counts it in the metrics; called once for each turn.

    `charged` is called afterwards, however the turn ended.
    """

    def __init__(
        self,
        prices: PriceSheets | PriceBook,
        metrics: Metrics,
        charged: Callable[[TurnRecord], None] = lambda record: None,
    ) -> None:
        self._prices = prices
        self._metrics = metrics
        self._charged = charged

    def charge(self, record: TurnRecord) -> None:
        if record.first_leg is not None and record.epoch is None:
            record.take_prefill(0)  # the engine that was to answer told nothing
        # The record is opened with the model whose price applies. Pricing replaces it by the id.
        model = (record.price or record.model).split("@")[0]
        charge(record, self._prices.find(model, record.opened_at.date()))
        self._metrics.count_turn(record)
        if record.num_removed:
            self._metrics.count("removed_nonces", amount=record.num_removed)
        self._charged(record)

    def most(self, ask: Ask, on: date) -> NanoDollars:
        """The most that the turn can cost, with the prompt's tokens as they are estimated.

        Without a price it costs nothing.
        """
        price = self._prices.find((ask.model.price or ask.model.id).split("@")[0], on)
        return NanoDollars(0) if price is None else price.most(ask.prompt_tokens, ask.most_output)

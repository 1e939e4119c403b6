"""What caching saved: money net of the write premium, and the prefill that was not computed.

Pure arithmetic over sums of the ledger. Own prices and published ones are never mixed. The cost at
a hosted model is only shown beside the cost here.
"""

from collections.abc import Iterable
from datetime import date

import msgspec

from gateway.admin.structs.usage import Avoided, HostedCost, Totals, Waterfall
from gateway.prices.price import Price, TokenPrices, cost_at
from gateway.prices.sheets import PriceSheets


class Priced(msgspec.Struct, frozen=True):
    """Sums of turns that share a price and a band of prompt lengths."""

    price: str
    prompt_above: int
    totals: Totals


def waterfall(groups: Iterable[Priced], own: PriceSheets) -> Waterfall:
    premium = discount = actual = counterfactual = unexplained = 0
    for group in groups:
        price, totals = own.with_id(group.price), group.totals
        if price is None:
            unexplained += totals.requests
            continue
        rates = price.rates_above(group.prompt_above)
        for ttl, tokens in totals.writes.items():
            premium += tokens * (rates.write(ttl) - rates.input)
        discount += totals.cache_read_tokens * (rates.input - rates.read)
        actual += totals.cost_nano
        counterfactual += totals.cost_without_cache_nano
    return Waterfall(
        counterfactual_nano=counterfactual,
        write_premium_nano=premium,
        read_discount_nano=discount,
        actual_nano=actual,
        saved_nano=counterfactual - actual,
        unexplained=unexplained,
    )


def comparisons(groups: Iterable[Priced], hosted: PriceSheets, on: date) -> list[HostedCost]:
    """The whole traffic at each hosted model's price of that day, the cheapest first."""
    listed = list(groups)
    found = [_compare(listed, price, hosted) for price in hosted.current(on)]
    return sorted(found, key=lambda comparison: (comparison.nano, comparison.model))


def _compare(groups: list[Priced], price: Price, hosted: PriceSheets) -> HostedCost:
    nano = without_cache = 0
    for group in groups:
        totals = group.totals
        cost = cost_at(price.rates_above(group.prompt_above), totals, totals.output_tokens)
        nano, without_cache = nano + cost.actual, without_cache + cost.without_cache
    return HostedCost(
        model=price.model,
        price=price.id,
        source=hosted.source,
        as_of=hosted.as_of.isoformat() if hosted.as_of else None,
        nano=nano,
        nano_without_cache=without_cache,
    )


def avoided(engine: str | None, model: str, totals: Totals) -> Avoided:
    rate = None
    if totals.prefill_us and totals.prefill_tokens:
        rate = totals.prefill_tokens / (totals.prefill_us / 1e6)
    seconds = None if rate is None else totals.cache_read_tokens / rate
    return Avoided(
        engine=engine,
        model=model,
        prefill_tokens=totals.cache_read_tokens,
        tokens_per_second=rate,
        prefill_seconds=seconds,
        gpu_hours=None if seconds is None else seconds / 3600,
    )


def costs_by_class(rates: TokenPrices, totals: Totals) -> dict[str, int]:
    """What each class of tokens cost, in nano-dollars; they add up to the cost."""
    return {
        "uncached_input_tokens": totals.input_tokens * rates.input,
        **{
            f"cache_creation.ephemeral_{ttl}_input_tokens": tokens * rates.write(ttl)
            for ttl, tokens in totals.writes.items()
        },
        "cache_read_input_tokens": totals.cache_read_tokens * rates.read,
        "output_tokens": totals.output_tokens * rates.output,
    }

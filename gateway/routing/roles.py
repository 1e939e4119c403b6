"""Whether a prompt is prefilled by one engine and answered by another. Pure.

A long prompt that nobody holds delays every answer that runs beside its prefill. An engine with the
role `prefill` has no answers beside it. It writes what the prompt's breakpoints mark to the store
that the engines share, and the answering engine reads that.

    here  = the answering engine's cost + delay_cost · tokens to prefill · running answers
    there = the prefill engine's cost + disk_cost · tokens to read + tokens behind the last marker
            + HAND_OVER_TOKENS

The costs are those of `cost.py`, in tokens of prefill.
"""

from collections.abc import Iterable, Sequence

from gateway.prompt.ask import Ask
from gateway.routing.cost import PromptSizes, Weights, place
from gateway.routing.held import PrefixEnd
from gateway.routing.router import EngineT, Route, candidate_of

MIN_TOKENS = 2048
"""A shorter prefill is not worth two requests."""
HAND_OVER_TOKENS = 512.0
"""The cost of writing to the store, telling it and a second request, in tokens of prefill."""


def marked_tokens(ask: Ask, ends: Sequence[PrefixEnd]) -> int:
    """The estimated tokens of the longest prefix that a breakpoint marks, 0 without one."""
    marked = ask.plan.deepest_marked()
    sizes = (end.size for end in ends if marked is not None and end.digest == marked[0])
    return next(sizes, 0)


def prefill_elsewhere(
    ask: Ask, route: Route[EngineT], ready: Iterable[EngineT], weights: Weights, now: float
) -> Route[EngineT] | None:
    """The engine that prefills for the engine of `route`; None if that one prefills it itself."""
    marked = marked_tokens(ask, route.ends)
    if ask.is_batch or marked - route.captured < MIN_TOKENS:
        return None
    engines = [engine for engine in ready if _prefills_for(engine, route.engine, now)]
    if not engines:
        return None
    prompt = PromptSizes(ends=route.ends, tokens=route.tokens)
    here = place(prompt, [candidate_of(route.engine)], weights, now).offer
    placement = place(prompt, [candidate_of(engine) for engine in engines], weights, now)
    there = placement.offer.cost + weights.disk_cost * (marked - route.captured)
    there += route.tokens - marked + HAND_OVER_TOKENS
    delay = weights.delay_cost * here.to_prefill * route.engine.load.num_decoding
    if here.cost + delay <= there:
        return None
    return Route(
        engine=engines[placement.chosen],
        ends=route.ends,
        tokens=route.tokens,
        to_prefill=int(placement.offer.to_prefill),
        captured=placement.offer.coverage.held,
        available=max(route.available, placement.available),
    )


def _prefills_for(engine: EngineT, other: EngineT, now: float) -> bool:
    """Whether the engine is for prefill, is free to take one, and is of the other's model."""
    mine, theirs = engine.description, other.description
    if mine is None or theirs is None or mine.role != "prefill" or theirs.role == "prefill":
        return False
    is_usable = not engine.is_draining and engine.breaker.allows(now)
    # An engine tells only by events that it can read what another wrote.
    is_usable = is_usable and other.holdings.source == "events"
    return is_usable and (mine.model, mine.kv_dtype) == (theirs.model, theirs.kv_dtype)

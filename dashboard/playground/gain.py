"""A second send against the first, in one sentence. Pure."""

from dashboard.admin.shapes.turns import Turn
from dashboard.ui import formats

_CLOSE = 1.2
"""Times that differ by less are told to be the same: both are measured once."""


def gained(first: Turn, second: Turn) -> str:
    """Time to first token, tokens read, and cost. Numbers alone stand in it, no text of users."""
    return f"{_sooner(first, second)} {_read(second)}{_cost(first, second)}."


def _sooner(first: Turn, second: Turn) -> str:
    before, now = first.first_token_seconds, second.first_token_seconds
    if not before or not now:
        return "**The second send** has no time to first token."
    times = before / now
    both = f"{formats.seconds(before)} → {formats.seconds(now)}"
    if times >= _CLOSE:
        return f"**The second send answered {times:.2g} times as soon**: {both}."
    if times <= 1 / _CLOSE:
        return f"**The second send answered later**: {both}."
    return f"**Both sends answered about as soon**: {both}."


def _read(second: Turn) -> str:
    return f"It read {second.cache_read_tokens:,} of its {second.prompt_tokens:,} prompt tokens"


def _cost(first: Turn, second: Turn) -> str:
    if first.cost_nano is None or second.cost_nano is None:
        return ""
    cost, before = formats.dollars(second.cost_nano), formats.dollars(first.cost_nano)
    return f" and cost {cost} instead of {before}"

"""How much of its limits per minute a workspace has left."""

from typing import NamedTuple


class Standing(NamedTuple):
    """One limit. After `reset_seconds` without use, all of `limit` is there again."""

    limit: int
    remaining: int
    reset_seconds: float


class Standings(NamedTuple):
    requests: Standing | None
    tokens: Standing | None

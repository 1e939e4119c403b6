"""Where a workspace stands against its limits of a minute."""

from typing import NamedTuple


class Standing(NamedTuple):
    """`reset_seconds` until all of `limit` is there again, if nothing more is used."""

    limit: int
    remaining: int
    reset_seconds: float


class Standings(NamedTuple):
    requests: Standing | None
    tokens: Standing | None

"""Where a workspace stands against its limits of a minute."""

from typing import NamedTuple


class Rate(NamedTuple):
    """`reset_seconds` until all of `limit` is there again, if nothing more is used."""

    limit: int
    remaining: int
    reset_seconds: float


class Rates(NamedTuple):
    requests: Rate | None
    tokens: Rate | None

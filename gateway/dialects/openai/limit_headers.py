"""The `x-ratelimit-*` response headers."""

import math
from collections.abc import Iterator

from gateway.base.standing import Standings


def limit_headers(rates: Standings) -> Iterator[tuple[str, str]]:
    """`reset` is how long until all of a limit is there again, such as `6m0s`."""
    for kind, rate in (("requests", rates.requests), ("tokens", rates.tokens)):
        if rate is not None:
            yield f"x-ratelimit-limit-{kind}", str(rate.limit)
            yield f"x-ratelimit-remaining-{kind}", str(rate.remaining)
            yield f"x-ratelimit-reset-{kind}", duration(rate.reset_seconds)


def duration(seconds: float) -> str:
    """A duration in OpenAI's form: `12ms`, `7s`, `6m0s`. It is rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, left = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{left}s" if minutes else f"{left}s"

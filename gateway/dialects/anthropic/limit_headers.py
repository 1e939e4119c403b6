"""The `anthropic-ratelimit-*` response headers."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from gateway.base.standing import Standings


def limit_headers(rates: Standings, now: datetime) -> Iterator[tuple[str, str]]:
    """`reset` is the time, RFC 3339, at which all of a limit is there again.

    There is one limit for all tokens. Input and output each end where it ends, so clients that
    look at one of them only find its numbers there too.
    """
    kinds = [
        ("requests", rates.requests),
        *((kind, rates.tokens) for kind in ("tokens", "input-tokens", "output-tokens")),
    ]
    for kind, rate in kinds:
        if rate is not None:
            reset = _in_whole_seconds(now + timedelta(seconds=rate.reset_seconds))
            yield f"anthropic-ratelimit-{kind}-limit", str(rate.limit)
            yield f"anthropic-ratelimit-{kind}-remaining", str(rate.remaining)
            yield f"anthropic-ratelimit-{kind}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")


def _in_whole_seconds(moment: datetime) -> datetime:
    """The time is rounded up, so that a client that waits until then is not early."""
    return moment.replace(microsecond=0) + timedelta(seconds=1 if moment.microsecond else 0)

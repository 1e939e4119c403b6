"""How many tokens requests have, and how long tokens take, counted in constant memory."""

from engine.cache.lifetimes import ValueCounts
from engine.protocol import SECONDS_PER_TOKEN, TOKENS_PER_REQUEST, Distribution, Distributions


class RequestDistributions:
    """Of one engine, since its epoch began. What they count is said at `Distributions`."""

    def __init__(self) -> None:
        self.input_tokens = ValueCounts(TOKENS_PER_REQUEST)
        self.output_tokens = ValueCounts(TOKENS_PER_REQUEST)
        self.inter_token_seconds = ValueCounts(SECONDS_PER_TOKEN)

    def report(self) -> Distributions:
        return Distributions(
            input_tokens=_told(self.input_tokens),
            output_tokens=_told(self.output_tokens),
            inter_token_seconds=_told(self.inter_token_seconds),
        )


def _told(values: ValueCounts) -> Distribution:
    return Distribution(edges=values.edges, counts=list(values.counts), total=values.total)

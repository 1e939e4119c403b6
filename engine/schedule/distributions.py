"""How many tokens requests have, and how long tokens take, counted in constant memory."""

from bisect import bisect_left
from collections.abc import Sequence

from engine.protocol import (
    SECONDS_PER_TOKEN,
    TOKENS_PER_REQUEST,
    Distribution,
    Distributions,
)


class DistributionCounts:
    """Counts of values by the edges of their buckets."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._total += value

    def report(self) -> Distribution:
        return Distribution(edges=list(self._edges), counts=list(self._counts), total=self._total)


class RequestDistributions:
    """Of one engine, since its epoch began. What they count is said at `Distributions`."""

    def __init__(self) -> None:
        self.input_tokens = DistributionCounts(TOKENS_PER_REQUEST)
        self.output_tokens = DistributionCounts(TOKENS_PER_REQUEST)
        self.inter_token_seconds = DistributionCounts(SECONDS_PER_TOKEN)

    def report(self) -> Distributions:
        return Distributions(
            input_tokens=self.input_tokens.report(),
            output_tokens=self.output_tokens.report(),
            inter_token_seconds=self.inter_token_seconds.report(),
        )

"""What one memory that forgets the least recently used would have given, for every size at once.

The distance of a use is the number of other units that were used since the last use of the same
one. A memory of more units than that has it still (Mattson et al. 1970). So one pass over the
traffic gives the whole curve, exactly. A prefix is there only as far as all before it is.
"""

from collections.abc import Iterable, Sequence

from gateway.planner.requests import PlannedRequest


class Distances:
    """`tokens[d]` were read at a distance of `d` units; `prompt` tokens are all that were asked."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.prompt = 0
        self.num_distinct = 0

    @property
    def read(self) -> int:
        return sum(self.tokens.values())

    def curve(self, sizes: Sequence[int]) -> list[float]:
        """The share of tokens that memories of these many units would have given."""
        found = sorted(self.tokens.items())
        shares, at, total = {}, 0, 0
        for size in sorted(sizes):
            while at < len(found) and found[at][0] < size:
                total += found[at][1]
                at += 1
            shares[size] = total / max(self.prompt, 1)
        return [shares[size] for size in sizes]

    def size_for(self, share: float) -> int:
        """The fewest units that give this share of what unlimited memory would."""
        wanted, total = share * self.read, 0
        for distance, tokens in sorted(self.tokens.items()):
            total += tokens
            if total >= wanted:
                return distance + 1
        return 1


def distances(requests: Iterable[PlannedRequest], num_uses: int) -> Distances:
    """`num_uses` is the number of all prompts' units together, at least."""
    made, tree, used_at, now = Distances(), [0] * (num_uses + 2), dict[int, int](), 0
    size = len(tree)
    for request in requests:
        made.prompt += request.tokens
        deepest = before = 0
        known = request.known
        for place, unit in enumerate(known):
            at = used_at.get(unit)
            if at is None:
                break
            deepest = max(deepest, _marked_after(tree, at, len(used_at)))
            tokens = request.tokens_at(place + 1)
            made.tokens[deepest] = made.tokens.get(deepest, 0) + tokens - before
            before = tokens
        # The tail is forgotten first.
        for unit in reversed(known):
            at = used_at.get(unit)
            if at is not None:
                _add(tree, size, at, -1)
            now += 1
            used_at[unit] = now
            _add(tree, size, now, 1)
    made.num_distinct = len(used_at)
    return made


def _add(tree: list[int], size: int, at: int, change: int) -> None:
    """A Fenwick tree: one mark for each unit, at its last use."""
    while at < size:
        tree[at] += change
        at += at & -at


def _marked_after(tree: list[int], at: int, total: int) -> int:
    while at:
        total -= tree[at]
        at &= at - 1
    return total

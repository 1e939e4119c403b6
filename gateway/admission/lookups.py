"""How often unknown keys of one address are looked up in the database. Pure but for its clock."""

import math
from collections import OrderedDict
from collections.abc import Callable

from gateway.admission.bucket import TokenBucket
from gateway.base.errors import TooManyUnknownKeys

_MAX_ADDRESSES = 10_000


class Lookups:
    def __init__(self, per_minute: int, monotonic: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, address: str) -> None:
        """Raise TooManyUnknownKeys; then nothing was taken. The address that was heard of longest
        ago is forgotten where there are too many."""
        now = self._monotonic()
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = TokenBucket.full(self._per_minute, now)
            if len(self._buckets) > _MAX_ADDRESSES:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(address)
        if (seconds := bucket.wait(1, now)) > 0:
            raise TooManyUnknownKeys(math.ceil(seconds))
        bucket.take(1, now)

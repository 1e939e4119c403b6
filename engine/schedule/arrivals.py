"""What comes back to the device: from the host tier by copies, from the store by loads."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.cache.prefix_cache import PrefixCache
from engine.cache.store_tier import Load
from engine.cache.table import BlockCopy
from engine.schedule.request import SequenceState


class Arrivals(NamedTuple):
    """`promotions` are copies (host, device). `num_missed` blocks have to be computed after all."""

    promotions: list[BlockCopy]
    loads: list[Load]
    num_missed: int = 0


def take_arrivals(cache: PrefixCache, running: Sequence[SequenceState], max_loads: int) -> Arrivals:
    """The blocks that one step brings back, in the order in which their sequences wait.

    At most as many copies as the host tier allows, and `max_loads` from the store.
    """
    promotions: list[BlockCopy] = []
    loads: list[Load] = []
    num_missed, is_first = 0, True
    for sequence in running:
        table = sequence.table
        while table.incoming:
            block = table.next_incoming
            if block.tier == "host":
                assert cache.host is not None
                if len(promotions) >= cache.host.max_copies:
                    break
                promotions.append(cache.host.promote(table))
                continue
            store = cache.store_of(block)
            if store.is_lost(block):
                request = sequence.request
                is_new = sequence is request.leader and request.started_at is None
                cache.miss(request.query, request.found if is_new else None, table)
                num_missed += 1
                continue
            load = store.promote(table) if len(loads) < max_loads else None
            if load is None:
                store.ask(table.arriving(), is_first=is_first)
                is_first = False
                break
            loads.append(load)
    return Arrivals(promotions, loads, num_missed)

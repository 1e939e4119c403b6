"""Leases on vLLM's own blocks, and why two books record them.

The connector's book (`leases.py`) is in the process of vLLM's scheduler. It says which blocks are
held. vLLM gives blocks away within a step, so only code in that process can keep a block. This book
knows blocks and the budget, and has no clock. It alone grants leases. It ends a lease where there
is no room for it.

The server's book (`loop.HeldEntries`) is in our process. It says which entries there are, how long
they live and which names they have. It decides look-ups, expiry, events and usage. It does so for
many requests between two steps, and no request waits for a step. It is the native engine's book.

One book would be wrong in either place. A book in the scheduler's process would make each look-up
and each event wait for a step. A book in our process would learn that a block is gone after vLLM
has given it away.

The two books agree by these rules:
- The connector grants a lease first. When it has reported the lease (`Report`,
  `HeldEntries.learn`), the server writes the lease down and tells clients of it.
- If the connector ends a lease, the server hears of it as a `Loss` (`HeldEntries.lose`). Until then
  a look-up may count on blocks that are gone. So usage is not what the look-up found, but what was
  reused according to the `Report` (`HeldCache.admit`).
- If a lease ends by time, the server ends it first and then tells the connector (`unlease`,
  `release`). Until then its blocks are held for longer than was promised.

So no first frame tells of a lease that nothing holds. Both engines decide by the same rules which
lease yields and which is sacrificed: `engine.cache.leases`.
"""

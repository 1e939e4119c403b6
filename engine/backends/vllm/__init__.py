"""Leases on vLLM's own blocks, and why they stand in two books.

The connector's book (`leases.py`) is in the process of vLLM's scheduler. It says which blocks are
held. vLLM gives blocks away within a step, so only who is there can keep one. This book knows
blocks and the budget. It alone grants leases, and ends one where there is no room. It has no clock.

The server's book (`loop.HeldEntries`) is in our process. It says which entries there are, until
when, under which names. Look-ups, expiry, events and usage are decided by it, for many requests
between two steps, and none waits for a step. It is the same book as on our own blocks.

One book would be wrong in either place. A book in the scheduler's process would make each look-up
and each event wait for a step. A book in our process would learn that a block is gone after vLLM
has given it away.

So that the two agree:
- A lease is granted by the connector first. The server writes it down when the connector has
  reported it (`Report`, `HeldEntries.learn`), and tells of it only then.
- A lease that the connector ended comes as a `Loss` (`HeldEntries.lose`). A look-up in between may
  count on what is gone. `Report` says what was reused, and the usage is made of that
  (`HeldCache.admit`).
- A lease ends by time in the server first (`unlease`, `release`). In between its blocks are held
  for longer than was promised.

Whichever is late, no lease is told that nothing holds. Which lease ends first is one rule for both
engines: `engine.cache.leases`.
"""

"""When requests with a known key begin: one in each round of the event loop, in turn between keys.

Between two steps of a turn the loop does all that is ready. Where one key's connections have sent a
thousand requests, that is their thousand beginnings, at each of the other turn's twenty steps. Here
one of them begins between two steps of anybody, and each key with requests is served in turn (round
robin, as Nagle asks for between the sources of a gateway in RFC 970).
"""

import asyncio

from engine.places import RoundRobin


class Beginnings:
    def __init__(self) -> None:
        self._waiting = RoundRobin()
        # One has begun in this round.
        self._is_taken = False

    async def wait(self, key: str) -> None:
        """Until a request of this key may begin: at once where no other has in this round."""
        if not self._is_taken:
            self._take_round()
            return
        await self._waiting.join(key)

    def _take_round(self) -> None:
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._begin_next)

    def _begin_next(self) -> None:
        beginning = self._waiting.next()
        if beginning is None:
            self._is_taken = False
            return
        # It runs in the next round, and the one behind it is chosen then.
        beginning.set_result(None)
        self._take_round()

"""When requests with a known key begin: a few in each round of the event loop, in turn.

Between two steps of a turn the event loop does all that is ready. If one key's connections have
sent a thousand requests, a thousand beginnings come before each of another turn's twenty steps.
Here only BATCH of them begin between two steps of any turn. Workspaces are served in turn (round
robin, as Nagle asks for between the sources of a gateway in RFC 970). So are the keys of each
workspace, which may make as many keys as it likes.
"""

import asyncio

from engine.places import RoundRobin

BATCH = 6
"""Requests that begin in one round. Requests that begin together go together to the threads of the
prompt worker and the journal. If they began one by one, they would cost 2.3 times as many changes
of threads, and half as much CPU again (`scripts.bench.gateway`, 32 connections). A client that
connects beside a crowd waits for five rounds (`tests/gateway/http/test_accepting.py`)."""


class Beginnings:
    def __init__(self) -> None:
        self._waiting = RoundRobin()
        self._num_begun = 0
        # The round ends with a callback of the loop, which is scheduled at its first beginning.
        self._is_open = False

    async def wait(self, workspace: str, key: str) -> None:
        """Wait until a request of this key may begin. It begins at once if the round has room."""
        if self._num_begun < BATCH:
            self._begin()
            return
        await self._waiting.join(workspace, key)

    def _begin(self) -> None:
        self._num_begun += 1
        if not self._is_open:
            self._is_open = True
            asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._is_open = False
        self._num_begun = 0
        while self._num_begun < BATCH:
            beginning = self._waiting.next()
            if beginning is None:
                return
            # The request runs in the next round.
            beginning.set_result(None)
            self._begin()

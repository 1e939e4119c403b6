"""Room at engines that workers may take without a question to their parent, in shared memory.

The parent writes how many turns and tokens the engines have room for, and how many turns of each
worker are in these numbers. A worker counts its own turns that are not. It takes no more than an
N-th of the room, so N workers that look at the same moment take no more than there is. A worker
whose messages the parent reads later than the others' can exceed that, by its N-th at most. Pure
but for that memory.
"""

from collections import deque

from gateway.base.shared_words import MAX_WORD, make_words, words_at


def make_room(num_workers: int) -> int:
    """The descriptor of memory for so many workers, without any room yet."""
    return make_words(2 + num_workers)


class Room:
    """The memory as all processes see it: turns, tokens, and the turns counted of each worker."""

    def __init__(self, descriptor: int, num_workers: int) -> None:
        self.num_workers = num_workers
        self._words = words_at(descriptor, 2 + num_workers)

    def tell(self, turns: int, tokens: int, counted: list[int]) -> None:
        """Note the room. `counted` is for each worker how many of its turns are in it."""
        words = self._words
        # A worker must never see its turns counted and the room as it was before them.
        words[0] = min(turns, words[0])
        words[1] = min(tokens, words[1])
        for index, number in enumerate(counted):
            words[2 + index] = number & MAX_WORD
        words[0], words[1] = min(turns, MAX_WORD), min(tokens, MAX_WORD)

    @property
    def turns(self) -> int:
        return self._words[0]

    @property
    def tokens(self) -> int:
        return self._words[1]

    def counted(self, worker: int) -> int:
        return self._words[1 + worker]


class OwnRoom:
    """What one worker may take."""

    def __init__(self, room: Room, worker: int) -> None:
        self._room = room
        self._worker = worker
        self._num_taken = room.counted(worker)
        self._uncounted: deque[int] = deque()
        self._tokens = 0

    def take(self, tokens: int) -> bool:
        """Take room for a turn of so many tokens. Return False, with none taken, without room."""
        room, uncounted = self._room, self._uncounted
        num_uncounted = (self._num_taken - room.counted(self._worker)) & MAX_WORD
        while len(uncounted) > num_uncounted:
            self._tokens -= uncounted.popleft()
        num = room.num_workers
        if num * (len(uncounted) + 1) > room.turns or num * (self._tokens + tokens) > room.tokens:
            return False
        self._num_taken += 1
        uncounted.append(tokens)
        self._tokens += tokens
        return True

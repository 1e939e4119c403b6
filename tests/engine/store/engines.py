"""An engine with a store in a real directory: real threads and files, a fake runner with a memory.

What a wrong block would do to an answer is seen at once: the runner answers with a checksum of what
it reads (`tests.engine.schedule.harness`).
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from pydantic import SecretStr

from engine.approximate.asking import Approximations
from engine.approximate.kinds import Sibling
from engine.backends.base import Parts
from engine.backends.storing import new_memory
from engine.cache.ids import Digest, TokenId
from engine.clock import Clock, ManualClock
from engine.protocol import Started
from engine.protocol.reports import StoreStats
from engine.settings import Settings
from tests.engine.backends.local import description
from tests.engine.schedule.harness import FakeRunner, Harness, Sent

NUM_BLOCKS = 64
BLOCK_SIZE = 4
DEADLINE_SECONDS = 120.0


class StoredEngine(Harness):
    """One process: `restart` begins the next one on the same directory."""

    running: ClassVar[list["StoredEngine"]] = []

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock | None = None,
        model: str = "m",
        store_bytes: int = 2**22,
        host_blocks: int = 0,
        num_blocks: int = NUM_BLOCKS,
        is_shared: bool = False,
        sibling: Sibling | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._options: dict[str, Any] = {
            "model": model,
            "store_bytes": store_bytes,
            "host_blocks": host_blocks,
            "num_blocks": num_blocks,
            "is_shared": is_shared,
            "sibling": sibling,
            "wall": wall,
        }
        runner = FakeRunner(num_blocks, BLOCK_SIZE, host_blocks)
        settings = Settings(
            secret=SecretStr("x" * 16),
            store=str(path),
            store_bytes=store_bytes,
            store_shared=is_shared,
            host_blocks=host_blocks,
        )
        parts = SimpleNamespace(
            runner=runner,
            facts={"weights": model},
            block_bytes=BLOCK_SIZE * 8,
            state_blocks=0,
            approximate=Approximations(sibling=sibling),
        )
        clock = clock or ManualClock()
        about = description(block_size=BLOCK_SIZE, num_blocks=num_blocks)
        memory = new_memory(settings, cast(Parts, cast(Any, parts)), about, clock, wall)
        cache, self.store, self.refused = memory
        self.running.append(self)
        disk = self.store.disk if self.store is not None else None
        super().__init__(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            clock=clock,
            runner=runner,
            cache=cache,
            store=disk,
            max_step_tokens=64,
            sibling=sibling,
        )

    @property
    def stats(self) -> StoreStats:
        assert self.store is not None
        return self.store.disk.stats()

    def finish(self, *sents: Sent, limit: int = 2000) -> None:
        """As ever, but files take their time."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not all(sent.is_over for sent in sents) and time.monotonic() < end:
            self.step()
            if self.store is not None and self.store.disk.is_reading:
                time.sleep(0.001)
        super().finish(*sents, limit=limit)

    def say(self, *segments: list[TokenId], ttl: Any = "1h", **options: Any) -> Sent:
        """A whole request with a breakpoint at its last segment."""
        sent = self.send(*segments, marks={len(segments) - 1: ttl}, **options)
        self.finish(sent)
        return sent

    def settle(self) -> None:
        """Step until nothing is wanted of the store, and everything is in its files."""
        self.step_until(lambda: not self.is_wanting)
        self.flush()

    @property
    def is_wanting(self) -> bool:
        """Whether blocks wait to be written to the store."""
        return self.cache.store is not None and self.cache.store.num_wanted > 0

    def flush(self) -> None:
        """Everything that was decided so far is in the files, and the engine knows it."""
        assert self.store is not None
        self.store.disk.flush().result(DEADLINE_SECONDS)
        self.step()

    def step_until(self, is_so: Callable[[], bool]) -> None:
        """Step until files and journal came so far."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not is_so():
            assert time.monotonic() < end, "it never came"
            self.step()
            time.sleep(0.001)

    def drop_files(self, scope: str, key: Digest | None = None) -> None:
        """Of a scope or one of its entries."""
        assert self.store is not None
        self.store.disk.drop(self.cache.digests(scope, []).root, key).result(60)

    def kill(self) -> None:
        """End without any goodbye: what waits for the threads is lost."""
        if self in self.running and self.store is not None:
            for peers in self.store.peers:
                peers.close()
            self.store.threads.abandon()
            self.store.directory.close()
            self.running.remove(self)

    def end(self, *, is_killed: bool = False) -> None:
        """A planned end writes what the store still lacks."""
        if is_killed:
            self.kill()
        elif self.store is not None:
            self.store.close(30.0)
            self.running.remove(self)

    def restart(self, *, is_killed: bool = False, **changes: object) -> "StoredEngine":
        """The next process, with the same options but for `changes`."""
        self.end(is_killed=is_killed)
        return self.next(**changes)

    def next(self, **changes: object) -> "StoredEngine":
        return StoredEngine(self.path, clock=self.clock, **{**self._options, **changes})


PREFIX = list(range(1, 23))
OTHER = list(range(101, 131))


def started(sent: Sent) -> Started:
    assert sent.started is not None
    return sent.started


def read_of(sent: Sent) -> int:
    return started(sent).usage.cache_read_tokens


class MovedWall:
    """A wall clock that a test moves."""

    def __init__(self) -> None:
        self.wall = 1e9

    def __call__(self) -> float:
        return self.wall

    def go_on(self, seconds: float) -> None:
        self.wall += seconds

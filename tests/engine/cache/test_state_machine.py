"""Random lives of many sequences over a small pool, checked against the world's oracles.

BLOCK_EXAMPLES and BLOCK_STEPS make it longer: `scripts/long_tests machine` does 5,000 x 80.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.cache.digests import ChainKind
from engine.protocol import TTLS
from tests.engine.cache.disk import damage, queue_notes, restart, save, work
from tests.engine.cache.lives import Life
from tests.engine.cache.world import World

SEGMENTS = ((1,), (2, 3), (1, 2, 3), (4, 5, 6, 7), (2, 1, 3), (1, 2, 3, 4, 5, 6), (7, 6, 5, 4))
SCOPES = st.sampled_from(["red", "red", "blue", "blue", "green"])
TTL = st.sampled_from(list(TTLS))
PROMPTS = st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=5)
MARKS = st.dictionaries(st.integers(0, 4), TTL, max_size=3)
WAITS = st.sampled_from([1.0, 150.0, 299.0, 300.0, 301.0, 3300.0, 3600.0, 43_199.0, 43_200.0])
AGES = st.sampled_from([0.0, 0.0, 1.0, 150.0, 299.0, 400.0])
ADAPTERS = st.builds(ChainKind, st.sampled_from(["1" * 64, "2" * 64]), st.integers(0, 24))
ADAPTER = st.none() | st.builds(ChainKind, st.just("1" * 64), st.just(0)) | ADAPTERS
HOLD = st.booleans()
INDEX = st.integers(0, 7)
TOKEN = st.integers(1, 4)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(
        lease_share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        scope_lease_share=st.sampled_from([0.0, 0.4, 0.5, 1.0]),
        host_blocks=st.sampled_from([0, 3, 8, 20]),
        store_blocks=st.sampled_from([0, 4, 12, 40]),
        max_copies=st.sampled_from([1, 100]),
        learns=st.booleans(),
        lease_shares=st.sampled_from([{}, {"red": 0.8}, {"red": 0.0, "blue": 1.0}]),
    )
    def begin_with(self, **settings) -> None:
        self.world = World(**settings)

    def pick(self, index: int, lives: list[Life]) -> Life:
        return lives[index % len(lives)]

    @property
    def waiting(self) -> list[Life]:
        return [life for life in self.world.lives if not life.is_running]

    @property
    def prefilling(self) -> list[Life]:
        return [life for life in self.world.lives if life.is_running and not life.is_started]

    @property
    def answering(self) -> list[Life]:
        return [life for life in self.world.lives if life.is_running and life.is_started]

    @precondition(lambda self: len(self.world.lives) < 4)
    @rule(
        scope=SCOPES,
        segments=PROMPTS,
        marks=MARKS,
        minimum=st.sampled_from([1, 1, 5]),
        age=AGES,
        adapter=ADAPTER,
        hold=HOLD,
    )
    def arrive(self, scope, segments, marks, minimum, age, adapter, hold) -> None:
        marks = {index: ttl for index, ttl in marks.items() if index < len(segments)}
        more = {"min_cache_tokens": minimum, "age": age, "adapter": adapter, "hold": hold}
        self.world.arrive(scope, segments, marks, **more)

    @precondition(lambda self: len(self.world.lives) < 4)
    @rule(
        scope=SCOPES,
        segments=PROMPTS,
        ttl=TTL,
        answer=st.integers(0, 4),
        age=AGES,
        adapter=ADAPTER,
        hold=HOLD,
    )
    def arrive_and_run(self, scope, segments, ttl, answer, age, adapter, hold) -> None:
        """A whole request at once: most of what is in the cache comes from here."""
        marks = {len(segments) - 1: ttl}
        life = self.world.arrive(scope, segments, marks, age=age, adapter=adapter, hold=hold)
        if self.world.begin(life):
            self.world.bring_back(life)
            self.world.compute(life, life.pending)
            self.world.start(life)
            for token in range(answer):
                self.world.decode(life, token)
        self.world.end(life)

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX)
    def begin(self, index) -> None:
        life = self.pick(index, self.waiting)
        if life.is_started:
            self.world.resume(life)
        else:
            self.world.begin(life)

    @precondition(lambda self: self.prefilling)
    @rule(index=INDEX, count=st.integers(1, 12))
    def prefill(self, index, count) -> None:
        life = self.pick(index, self.prefilling)
        self.world.compute(life, min(count, life.pending))
        if life.pending == 0:
            self.world.start(life)

    @precondition(lambda self: any(life.table.incoming for life in self.world.lives))
    @rule(count=st.integers(1, 3))
    def bring_back(self, count) -> None:
        for life in self.world.lives:
            self.world.bring_back(life, count)

    @precondition(lambda self: self.answering)
    @rule(index=INDEX, token=TOKEN)
    def decode(self, index, token) -> None:
        life = self.pick(index, self.answering)
        if life.pending > 1:
            self.world.bring_back(life)
            self.world.compute(life, life.pending)
        else:
            self.world.decode(life, token)

    @precondition(lambda self: self.answering and len(self.world.lives) < 4)
    @rule(index=INDEX, drop=st.integers(0, 2))
    def fork(self, index, drop) -> None:
        life = self.pick(index, self.answering)
        if life.pending <= 1:
            self.world.fork(life, drop)

    @precondition(lambda self: self.answering)
    @rule(index=INDEX)
    def preempt(self, index) -> None:
        self.world.preempt(self.pick(index, self.answering))

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX)
    def end(self, index) -> None:
        self.world.end(self.pick(index, self.world.lives))

    @rule(index=st.integers(0, 9))
    def lose(self, index) -> None:
        """Blocks go in any order: holes."""
        block = self.world.pool.blocks[index]
        if block.ref_count == 0:
            self.world.lose(block)

    @rule(seconds=WAITS)
    def wait(self, seconds) -> None:
        self.world.wait(seconds)

    @rule(scope=SCOPES, index=INDEX, is_one=st.booleans())
    def drop(self, scope, index, is_one) -> None:
        keys = [entry.key for entry in self.world.entries.live() if entry.scope == scope]
        if not is_one:
            self.world.drop(scope)
        elif keys:
            self.world.drop(scope, keys[index % len(keys)])

    @rule(digest=st.sampled_from(["1" * 64, "2" * 64]))
    def drop_adapter(self, digest) -> None:
        self.world.drop_adapter(digest)

    @precondition(lambda self: self.world.pool.num_leased)
    @rule()
    def sacrifice(self) -> None:
        self.world.sacrifice()

    @precondition(lambda self: self.world.store is not None)
    @rule(count=st.sampled_from([1, 2, 100]))
    def save(self, count) -> None:
        save(self.world, count)

    @precondition(lambda self: self.world.disk.line)
    @rule(count=st.sampled_from([1, 3, 100]), is_good=st.sampled_from([True, True, True, False]))
    def work(self, count, is_good) -> None:
        work(self.world, count, is_good=is_good)

    @precondition(lambda self: self.world.store is not None)
    @rule()
    def save_all(self) -> None:
        """Most of what is in the store comes from here."""
        save(self.world)
        work(self.world)

    @precondition(lambda self: self.world.disk.files)
    @rule(index=st.integers(0, 40), is_torn=st.booleans())
    def damage(self, index, is_torn) -> None:
        damage(self.world, index, is_torn=is_torn)

    @precondition(lambda self: self.world.store is not None)
    @rule(is_planned=st.booleans())
    def restart(self, is_planned) -> None:
        restart(self.world, is_planned=is_planned)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """When everybody has gone and every time is over, every block is free of references."""
        for life in list(self.world.lives):
            self.world.end(life)
        self.world.wait(max(ttl.seconds for ttl in TTLS.values()) + 1)
        self.world.check()
        assert self.world.pool.num_reclaimable == self.world.num_blocks
        assert self.world.host.pool.num_reclaimable == self.world.host_blocks
        assert len(self.world.entries) == self.world.pool.num_leased == 0
        if self.world.store is not None:
            while self.world.store.num_wanted:
                save(self.world)
                work(self.world)
            work(self.world)
            assert self.world.store.pool.num_reclaimable == self.world.store_blocks
            queue_notes(self.world)
            work(self.world)
            assert not self.world.disk.journal, "the journal tells of an entry that has ended"
            assert len(self.world.disk.files) == self.world.store.num_used


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=int(os.environ.get("BLOCK_EXAMPLES", "200")),
    stateful_step_count=int(os.environ.get("BLOCK_STEPS", "50")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

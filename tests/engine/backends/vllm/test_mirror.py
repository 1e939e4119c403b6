"""Our books over vLLM's blocks, with a connector that says what the test wants."""

from collections.abc import Sequence

import pytest

from engine.backends.external import MirrorPool
from engine.backends.vllm.directive import Directive, Held, HoldState, Loss, LossReason, Report
from engine.backends.vllm.mirror import HeldCache, HeldEntries
from engine.cache.digests import ChainHasher
from engine.cache.lookup import Segment
from engine.cache.prefix_cache import CacheQuery, CacheResult, Found
from engine.protocol import Breakpoint, ChainGone, HeldName
from tests.engine.cache.checks import check_entries, check_pool

SIZE = 4
PROMPT = list(range(100, 118))  # four full blocks and a tail
NAME = "00112233aabbccdd"


class Books:
    """`time` is moved by hand; a request is looked up, then answered with what vLLM reused."""

    def __init__(self) -> None:
        self.pool = MirrorPool(32, SIZE)
        self.entries = HeldEntries(self.pool, ttl_scale=1.0)
        self.cache = HeldCache(self.pool, self.entries, ChainHasher(b"key", SIZE))
        self.time = 0.0

    def query(self, tokens: Sequence[int] = PROMPT, ends: Sequence[int] = (8, 16)) -> CacheQuery:
        return CacheQuery(
            scope="scope",
            tokens=tokens,
            digests=self.cache.digests("scope", tokens),
            segments=[Segment("text", end) for end in ends],
            breakpoints=[Breakpoint(index) for index in range(len(ends))],
            names=[HeldName(NAME, ends[-1])],
            min_tokens=1,
            arrived_at=self.time,
        )

    def ask(self, query: CacheQuery) -> tuple[Found, Directive]:
        found = self.cache.look_up(query)
        return found, self.cache.directive("request", query, found, None)

    def answer(
        self,
        query: CacheQuery,
        asked: tuple[Found, Directive],
        hit_tokens: int = 0,
        state: HoldState = "leased",
    ) -> CacheResult:
        found, directive = asked
        held = [
            Held(key=want.key, state=state, tokens=want.tokens if state != "none" else 0)
            for want in directive.wants
        ]
        report = Report(request_id="request", hit_tokens=hit_tokens, read_tokens=0, held=held)
        table = self.cache.new_table(query)
        self.cache.admit(query, found, table, report)
        written = self.cache.write(query, found, table, self.time)
        self.cache.let_go(found)
        table.release()
        self.cache.let_off(directive)
        check_pool(self.pool)
        check_entries(self.entries)
        return written

    def write(self, state: HoldState = "leased") -> Directive:
        query = self.query()
        asked = self.ask(query)
        self.answer(query, asked, state=state)
        return asked[1]

    def lose(self, key: str, *reasons: LossReason) -> None:
        self.cache.lose([Loss(key=key, reason=reason) for reason in reasons])


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_read_is_what_vllm_reused_of_the_entry(books: Books) -> None:
    books.write()
    query = books.query()
    asked = books.ask(query)
    assert asked[1].read_tokens == 16
    usage = books.answer(query, asked, hit_tokens=16).usage
    assert (usage.cache_read_tokens, usage.automatic_tokens, usage.computed_tokens) == (16, 0, 2)


def test_a_prompt_that_ends_with_its_entry_is_read_a_block_short(books: Books) -> None:
    tokens = PROMPT[:16]
    for hit, read in ((0, 0), (12, 12)):
        query = books.query(tokens)
        usage = books.answer(query, books.ask(query), hit_tokens=hit).usage
        assert usage.cache_read_tokens == read <= hit
    assert usage.cache_write_5m_tokens == 4


def test_a_hit_that_was_lost_on_the_way_is_none(books: Books) -> None:
    books.write()
    query = books.query()
    asked = books.ask(query)
    books.lose(asked[1].wants[1].key, "sacrificed", "evicted")
    written = books.answer(query, asked, hit_tokens=12)
    assert written.usage.cache_read_tokens == 8, "the shorter entry is still there"
    assert written.usage.automatic_tokens == 4
    assert written.miss_reason == "sacrificed"
    (ended,) = books.entries.leases.take_ended()
    assert (ended.reason, ended.names) == ("sacrificed", [NAME])


@pytest.mark.parametrize("reason", ["sacrificed", "yielded"])
def test_an_entry_without_its_lease_can_be_read_and_leased_again(
    books: Books, reason: LossReason
) -> None:
    directive = books.write()
    for want in directive.wants:
        books.lose(want.key, reason)
    assert {entry.state for entry in books.entries.live()} == {"best_effort"}
    query = books.query()
    written = books.answer(query, books.ask(query), hit_tokens=16)
    assert written.usage.cache_read_tokens == 16
    assert [report.state for report in written.breakpoints] == ["leased", "leased"]


def test_what_the_connector_could_not_hold_is_no_entry_and_not_billed(books: Books) -> None:
    query = books.query()
    written = books.answer(query, books.ask(query), state="none")
    assert [report.state for report in written.breakpoints] == ["none", "none"]
    assert written.usage.input_tokens == len(PROMPT)
    assert not books.entries.live()


def test_an_expired_entry_is_released_unless_somebody_waits_for_it(books: Books) -> None:
    directive = books.write()
    keys = {bytes.fromhex(want.key) for want in directive.wants}
    books.time = 300.0
    query = books.query()
    asked = books.ask(query)
    books.entries.expire(books.time)
    assert books.cache.take_released() == []
    assert set(books.cache.let_off(asked[1])) == keys, "it never began to answer"


def test_names_go_with_their_block_and_only_then(books: Books) -> None:
    directive = books.write()
    (watch,) = directive.watches
    assert watch.tokens == 16
    books.entries.drop("scope")
    assert books.pool.changes.take() == []
    books.lose(watch.key, "evicted")
    assert books.pool.changes.take() == [ChainGone(seq=0, names=[NAME], reason="evicted")]
    assert books.pool.counts().free == books.pool.num_blocks, "nothing is mirrored any more"


def test_nothing_is_mirrored_of_a_prompt_without_entries_and_names(books: Books) -> None:
    query = books.query(ends=(8,))
    query = CacheQuery(
        **{
            name: getattr(query, name)
            for name in ("scope", "tokens", "digests", "segments", "min_tokens", "arrived_at")
        },
        breakpoints=[],
        names=[],
    )
    books.answer(query, books.ask(query))
    assert books.pool.counts().free == books.pool.num_blocks

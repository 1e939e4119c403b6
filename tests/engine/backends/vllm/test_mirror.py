"""Our books over vLLM's blocks, with a connector that says what the test wants."""

import pytest

from engine.backends.external import MirrorPool
from engine.backends.vllm.directive import (
    Directive,
    Loss,
    LossReason,
    Report,
    WantOutcome,
)
from engine.backends.vllm.loop import HeldCache, HeldEntries
from engine.cache.digests import ChainHasher
from engine.cache.lookup import Segment
from engine.cache.prefix_cache import CacheQuery, CacheResult
from engine.protocol import Breakpoint, ChainGone, EntryState, HeldName
from tests.engine.cache.checks import check_entries, check_pool

SIZE = 4
PROMPT = list(range(100, 118))  # four full blocks and a tail
NAME = "00112233aabbccdd"


class Books:
    """`time` is moved by hand; a request is looked up, then answered with what vLLM reused."""

    def __init__(self) -> None:
        self.pool = MirrorPool(32, SIZE)
        self.entries = HeldEntries(self.pool)
        self.cache = HeldCache(self.pool, self.entries, ChainHasher(b"key", SIZE))
        self.time = 0.0

    def ask(self) -> Directive:
        ends = (8, 16)
        self._query = query = CacheQuery(
            scope="scope",
            tokens=PROMPT,
            digests=self.cache.digests("scope", PROMPT),
            segments=[Segment("text", end) for end in ends],
            breakpoints=[Breakpoint(index) for index in range(len(ends))],
            names=[HeldName(NAME, ends[-1])],
            min_cache_tokens=1,
            arrived_at=self.time,
        )
        self._found = self.cache.look_up(query)
        self._directive = self.cache.directive("request", query, self._found, None)
        return self._directive

    def answer(self, hit_tokens: int = 0, state: EntryState = "leased") -> CacheResult:
        outcomes = [
            WantOutcome(key=want.key, state=state, tokens=want.tokens if state != "none" else 0)
            for want in self._directive.wants
        ]
        report = Report(request_id="request", hit_tokens=hit_tokens, held=outcomes)
        table = self.cache.new_table(self._query)
        self.cache.admit(self._query, self._found, table, report)
        start = self.cache.write(self._query, self._found, table, self.time)
        self.cache.let_go(self._found)
        table.release()
        self.cache.let_off(self._directive)
        check_pool(self.pool)
        check_entries(self.entries)
        return start

    def write(self) -> Directive:
        query = self.ask()
        self.answer()
        return query

    def lose(self, key: str, *reasons: LossReason) -> None:
        self.cache.lose([Loss(key=key, reason=reason) for reason in reasons])


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_read_is_what_vllm_reused_of_the_entry(books: Books) -> None:
    assert books.write().wants[1].key == books.ask().read
    usage = books.answer(hit_tokens=16).usage
    assert (usage.cache_read_tokens, usage.automatic_tokens, usage.computed_tokens) == (16, 0, 2)


def test_a_hit_that_was_lost_on_the_way_is_none(books: Books) -> None:
    books.write()
    books.lose(books.ask().wants[1].key, "sacrificed", "evicted")
    answer = books.answer(hit_tokens=12)
    assert answer.usage.cache_read_tokens == 8, "the shorter entry is still there"
    assert answer.usage.automatic_tokens == 4
    assert answer.miss_reason == "sacrificed"
    assert [report.missed for report in answer.breakpoints] == [None, "sacrificed"]
    (ended,) = books.entries.leases.take_ended()
    assert (ended.reason, ended.names) == ("sacrificed", [NAME])


def test_a_cache_that_was_emptied_was_so_by_hand(books: Books) -> None:
    """`/reset_prefix_cache`, and sleep: nobody took the room."""
    directive = books.write()
    for want in directive.wants:
        books.lose(want.key, "reset")
    assert {ended.reason for ended in books.entries.leases.take_ended()} == {"dropped"}
    books.ask()
    answer = books.answer(hit_tokens=0)
    assert answer.usage.cache_read_tokens == 0
    assert [report.missed for report in answer.breakpoints] == ["dropped"] * 2
    assert answer.miss_reason == "dropped"


def test_an_entry_of_which_vllm_reused_less_than_the_books_say_was_evicted(books: Books) -> None:
    books.write()
    books.ask()
    answer = books.answer(hit_tokens=8)
    assert answer.usage.cache_read_tokens == 8
    assert answer.miss_reason == "best_effort_evicted"
    assert [report.missed for report in answer.breakpoints] == [None, "best_effort_evicted"]
    books.ask()
    answer = books.answer(hit_tokens=4)
    assert answer.usage.cache_read_tokens == 0
    assert [report.missed for report in answer.breakpoints] == ["best_effort_evicted"] * 2


@pytest.mark.parametrize("reason", ["sacrificed", "yielded"])
def test_an_entry_without_its_lease_can_be_read_and_leased_again(
    books: Books, reason: LossReason
) -> None:
    directive = books.write()
    for want in directive.wants:
        books.lose(want.key, reason)
    assert {entry.state for entry in books.entries.live()} == {"best_effort"}
    books.ask()
    answer = books.answer(hit_tokens=16)
    assert answer.usage.cache_read_tokens == 16
    assert [report.state for report in answer.breakpoints] == ["leased", "leased"]


def test_what_the_connector_could_not_hold_is_no_entry_and_not_billed(books: Books) -> None:
    books.ask()
    answer = books.answer(state="none")
    assert [report.state for report in answer.breakpoints] == ["none", "none"]
    assert answer.usage.input_tokens == len(PROMPT)
    assert not books.entries.live()


def test_an_expired_entry_is_released_unless_somebody_waits_for_it(books: Books) -> None:
    directive = books.write()
    keys = {bytes.fromhex(want.key) for want in directive.wants}
    books.time = 300.0
    query = books.ask()
    books.entries.expire(books.time)
    assert books.cache.take_released() == []
    assert set(books.cache.let_off(query)) == keys, "it never began to answer"


def test_names_go_with_their_block_and_only_then(books: Books) -> None:
    directive = books.write()
    (watch,) = directive.watches
    assert watch.tokens == 16
    books.entries.drop("scope")
    assert books.pool.changes.take() == []
    books.lose(watch.key, "evicted")
    assert books.pool.changes.take() == [ChainGone(seq=0, names=[NAME], reason="evicted")]
    assert books.pool.counts().free == books.pool.num_blocks, "nothing is mirrored any more"

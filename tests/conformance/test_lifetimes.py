"""Entries in time: exactly their TTL, refreshed by reads, ended early only when it must be."""

import msgspec
import pytest

from engine.protocol import TTLS, DropReply, PurgeReply, Started, Ttl
from tests.conformance.engines import TICK, Engine, prompt

LIVES = [(ttl, kind.seconds) for ttl, kind in TTLS.items()]
"""How long they are, `tests/engine/test_ttls.py` says by their names."""


def read(engine: Engine, text: str, scope: str, ttl: Ttl = "5m") -> Started:
    return engine.ask(prompt(text, engine.text(5)), scope, (0, ttl)).started


def fill(engine: Engine, blocks: int) -> str:
    """A text that takes about this many blocks, scaffold included."""
    return engine.text(blocks * engine.description.block_size - 24)


@pytest.mark.parametrize(("ttl", "seconds"), LIVES)
def test_an_entry_can_be_read_until_its_ttl_is_over(engine: Engine, ttl: Ttl, seconds: int) -> None:
    for wait, is_found in ((seconds - TICK, True), (seconds, False)):
        scope = engine.scope()
        text = engine.text(60)
        (report,) = read(engine, text, scope, ttl).breakpoints
        assert report.expires_in_seconds == engine.promised(seconds)
        engine.advance(wait)
        started = read(engine, text, scope, ttl)
        assert (started.usage.cache_read_tokens > 0) == is_found
        assert started.miss_reason == (None if is_found else "ttl_expired")


@pytest.mark.parametrize(("ttl", "seconds"), LIVES)
def test_every_read_starts_the_ttl_again(engine: Engine, ttl: Ttl, seconds: int) -> None:
    scope = engine.scope()
    text = engine.text(60)
    read(engine, text, scope, ttl)
    for _ in range(3):
        engine.advance(seconds - 1)
        assert read(engine, text, scope, ttl).usage.cache_read_tokens > 0
    engine.advance(seconds)
    assert read(engine, text, scope, ttl).usage.cache_read_tokens == 0


def test_a_read_at_a_later_breakpoint_refreshes_the_entry_it_found(engine: Engine) -> None:
    scope = engine.scope()
    shared = engine.text(60)
    read(engine, shared, scope)
    engine.advance(200)
    engine.ask(prompt(shared, engine.text(40)), scope, 1)
    engine.advance(200)
    assert read(engine, shared, scope).usage.cache_read_tokens > 0


@pytest.mark.parametrize(("bought", "second_ttl", "lives"), [("5m", "1h", 300), ("1h", "5m", 3600)])
def test_an_entry_keeps_its_first_ttl(
    engine: Engine, bought: Ttl, second_ttl: Ttl, lives: int
) -> None:
    scope = engine.scope()
    text = engine.text(60)
    read(engine, text, scope, bought)
    again = read(engine, text, scope, second_ttl)
    assert again.usage.cache_write_5m_tokens == again.usage.cache_write_1h_tokens == 0
    (report,) = again.breakpoints
    assert (report.ttl, report.expires_in_seconds) == (bought, engine.promised(lives))
    engine.advance(lives)
    assert read(engine, text, scope).usage.cache_read_tokens == 0


def test_a_prefix_can_be_read_after_its_longer_continuation_expired(engine: Engine) -> None:
    scope = engine.scope()
    head = engine.text(60)
    tail = engine.text(40)
    conversation = prompt(head, tail)
    engine.ask(conversation, scope, (0, "1h"), (1, "5m"))
    engine.advance(300)
    usage = engine.ask(conversation, scope, (0, "1h"), (1, "5m")).usage
    first, second = engine.ends(conversation)
    assert usage.cache_read_tokens == first
    assert (usage.cache_write_1h_tokens, usage.cache_write_5m_tokens) == (0, second - first)


def test_the_entries_are_listed_with_what_is_left_of_them(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(60), engine.text(40))
    engine.ask(conversation, scope, (0, "1h"), (1, "5m"))
    engine.advance(100)
    engine.ask(conversation, scope, 0)
    listed = {entry.tokens: entry for entry in engine.entries(scope)}
    first, second = engine.ends(conversation)
    assert (listed[first].ttl, listed[first].expires_in_seconds) == ("1h", 3600)
    assert (listed[second].ttl, listed[second].expires_in_seconds) == ("5m", 200)
    assert [listed[first].reads, listed[second].reads] == [1, 0]
    assert all(entry.state == engine.written_state for entry in listed.values())


def test_a_lease_holds_its_blocks_until_it_ends(engine: Engine) -> None:
    engine.require("hold")
    engine.advance(3600)
    scope = engine.scope()
    text = engine.text(160)
    before = engine.stats()
    end = engine.ends(prompt(text))[0]
    engine.ask(prompt(text), scope, 0)
    during = engine.stats()
    size = engine.description.block_size
    assert during.blocks.leased - before.blocks.leased == -(-end // size)
    assert during.num_leases == before.num_leases + 1
    engine.advance(300)
    after = engine.stats()
    assert after.blocks.leased == before.blocks.leased
    assert after.counters.leases_expired == during.counters.leases_expired + 1


def test_shared_prefixes_are_held_once(engine: Engine) -> None:
    engine.require("hold")
    engine.advance(3600)
    scope = engine.scope()
    shared = engine.text(320)
    before = engine.stats().blocks.leased
    engine.ask(prompt(shared), scope, 0)
    once = engine.stats().blocks.leased - before
    for _ in range(5):
        engine.ask(prompt(shared, engine.text(20)), scope, 0, 1)
    assert engine.stats().blocks.leased - before <= once + 5 * 3


def test_a_drop_ends_a_scopes_leases_and_no_others(engine: Engine) -> None:
    mine = engine.scope()
    yours = engine.scope()
    text = engine.text(60)
    for scope in (mine, yours):
        read(engine, text, scope)
    assert engine.drop(mine) == 1
    assert engine.drop(mine) == 0
    dropped = read(engine, text, mine)
    assert (dropped.usage.cache_read_tokens, dropped.miss_reason) == (0, "dropped")
    assert read(engine, text, yours).usage.cache_read_tokens > 0


def test_a_purge_lets_go_of_a_scope_and_of_no_other(engine: Engine) -> None:
    mine = engine.scope()
    yours = engine.scope()
    text = engine.text(60)
    for scope in (mine, yours):
        read(engine, text, scope)
    purged = engine.post("purge", {"scope": mine}, PurgeReply)
    assert (purged.entries, purged.busy_blocks) == (1, 0)
    assert engine.post("purge", {"scope": mine}, PurgeReply).entries == 0
    mine_again = read(engine, text, mine)
    assert (mine_again.usage.cache_read_tokens, mine_again.miss_reason) == (0, "dropped")
    assert read(engine, text, yours).usage.cache_read_tokens > 0


def test_a_release_is_counted_apart_from_a_drop(engine: Engine) -> None:
    engine.require("hold")
    scope = engine.scope()
    read(engine, engine.text(60), scope)
    before = engine.stats().counters
    release = {"scope": scope, "by": "owner"}
    assert engine.post("drop", release, DropReply).dropped == 1
    after = engine.stats().counters
    assert after.leases_released == before.leases_released + 1
    assert after.leases_dropped == before.leases_dropped


def test_entries_are_told_page_by_page(engine: Engine) -> None:
    scope = engine.scope()
    for _ in range(5):
        read(engine, engine.text(60), scope)
    whole = sorted(entry.entry for entry in engine.entries(scope))
    pages = []
    while True:
        page = engine.page(scope, after=pages[-1] if pages else "", limit=2)
        assert len(page) <= 2
        if not page:
            break
        pages += [entry.entry for entry in page]
    assert pages == whole and len(whole) >= 5


def test_a_drop_can_name_one_entry(engine: Engine) -> None:
    scope = engine.scope()
    first_text = engine.text(60)
    second_text = engine.text(60)
    read(engine, first_text, scope)
    (entry,) = engine.entries(scope)
    read(engine, second_text, scope)
    assert engine.drop(engine.scope(), entry.entry) == 0, "not another scope's"
    assert engine.drop(scope, entry.entry) == 1
    assert read(engine, second_text, scope).usage.cache_read_tokens > 0
    assert read(engine, first_text, scope).usage.cache_read_tokens == 0


def test_over_the_budget_an_entry_is_best_effort_and_says_so(tiny_engine: Engine) -> None:
    tiny_engine.require("hold")
    engine = tiny_engine
    scopes = [engine.scope(), engine.scope()]
    texts = [fill(engine, 6), fill(engine, 6)]
    reports = [
        engine.ask(prompt(text), scope, 0).started.breakpoints[0]
        for text, scope in zip(texts, scopes, strict=True)
    ]
    assert [report.state for report in reports] == ["leased", "best_effort"]
    stats = engine.stats()
    assert stats.blocks.leased <= 8 and stats.blocks.best_effort > 0
    assert (stats.num_entries, stats.num_leases) == (2, 1)
    again = engine.ask(prompt(texts[1]), scopes[1], 0)
    assert again.usage.cache_read_tokens > 0, "its blocks happen to be in memory"
    engine.drop(scopes[0])
    promoted = engine.ask(prompt(texts[1]), scopes[1], 0).started.breakpoints[0]
    assert promoted.state == "leased"


def test_a_lease_survives_whatever_can_wait_for_other_blocks(tiny_engine: Engine) -> None:
    tiny_engine.require("hold")
    engine = tiny_engine
    scope = engine.scope()
    text = fill(engine, 6)
    read_first = engine.ask(prompt(text), scope, 0)
    before = engine.stats().counters.leases_sacrificed
    for _ in range(8):
        engine.ask(prompt(fill(engine, 7)), engine.scope(), max_tokens=4)
    assert engine.stats().counters.leases_sacrificed == before
    usage = engine.ask(prompt(text), scope, 0).usage
    assert usage.cache_read_tokens == read_first.usage.cache_write_5m_tokens


def test_a_lease_is_sacrificed_only_when_nothing_else_can_run(tiny_engine: Engine) -> None:
    tiny_engine.require("hold")
    engine = tiny_engine
    scope = engine.scope()
    text = fill(engine, 6)
    engine.ask(prompt(text), scope, 0)
    before = engine.stats().counters.leases_sacrificed
    engine.ask(prompt(fill(engine, 13)), engine.scope())
    assert engine.stats().counters.leases_sacrificed == before + 1
    started = engine.ask(prompt(text), scope, 0).started
    assert started.usage.cache_read_tokens == 0
    assert started.miss_reason == "sacrificed"


def test_the_pool_adds_up_whatever_happens(tiny_engine: Engine) -> None:
    engine = tiny_engine
    for index in range(12):
        engine.ask(prompt(fill(engine, 2 + index % 10)), engine.scope(), 0, max_tokens=3)
        blocks = engine.stats().blocks
        parts = (blocks.free, blocks.active, blocks.leased, blocks.best_effort, blocks.cached)
        assert sum(parts) == blocks.total == engine.description.num_blocks
        assert blocks.active == 0


def test_a_turn_reads_what_was_readable_when_it_arrived(engine: Engine) -> None:
    """Rule 3: it arrived at 295 of 300 seconds, and came to the engine at 305."""
    for age, is_found in ((10, True), (5, False)):
        scope = engine.scope()
        text = engine.text(60)
        read(engine, text, scope)
        engine.advance(305)
        request = engine.request(prompt(text, engine.text(5)), scope, (0, "5m"))
        with engine.stream(msgspec.structs.replace(request, age_seconds=age)) as stream:
            started = stream.start()
            stream.rest()
        assert (started.usage.cache_read_tokens > 0) == is_found
        if is_found:
            assert started.breakpoints[0].expires_in_seconds == engine.promised(290)


def test_an_entry_that_nothing_holds_promises_no_end_and_says_why(tiny_engine: Engine) -> None:
    scope = tiny_engine.scope()
    (report,) = read(tiny_engine, fill(tiny_engine, 12), scope).breakpoints
    assert (report.state, report.expires_in_seconds) == ("best_effort", None)
    reason = "over_budget" if tiny_engine.keeps("hold") else "no_hold"
    assert report.reason == reason
    (listed,) = tiny_engine.entries(scope)
    assert listed.reason == reason


@pytest.mark.parametrize("lifetime", [40.0, 1800.0, 86_400.0])
def test_an_entry_lives_its_own_lifetime_whatever_is_read(engine: Engine, lifetime: float) -> None:
    for wait, is_found in ((lifetime - TICK, True), (lifetime, False)):
        scope = engine.scope()
        text = engine.text(60)
        # Words differ in tokens: two entries of one length would be one entry.
        later = prompt(text, engine.text(5 + 4 * engine.description.granularity))
        assert engine.ends(later)[0] < engine.ends(later)[1]
        answer = engine.ask(prompt(text, engine.text(5)), scope, (0, "1h"), seconds=lifetime)
        (report,) = answer.started.breakpoints
        assert report.expires_in_seconds == engine.promised(lifetime)
        assert answer.usage.cache_write_1h_tokens > 0
        engine.advance(lifetime / 2)
        # A later breakpoint reads it. That refreshes an entry of a TTL, and not this one.
        engine.ask(later, scope, 1)
        engine.advance(wait - lifetime / 2)
        assert (read(engine, text, scope).usage.cache_read_tokens > 0) == is_found


def test_a_breakpoint_at_an_entry_moves_its_own_end_later_only(engine: Engine) -> None:
    engine.require("hold")
    scope = engine.scope()
    text = engine.text(60)

    def expires(seconds: float | None) -> float | None:
        answer = engine.ask(prompt(text, engine.text(5)), scope, (0, "5m"), seconds=seconds)
        return answer.started.breakpoints[0].expires_in_seconds

    assert expires(1000) == 1000
    assert expires(400) == 1000
    assert expires(2000) == 2000
    assert expires(None) == 2000
    (entry,) = engine.entries(scope)
    assert entry.has_own_lifetime


def test_an_entry_of_a_class_has_no_lifetime_of_its_own(engine: Engine) -> None:
    engine.require("hold")
    scope = engine.scope()
    text = engine.text(60)
    read(engine, text, scope)
    (entry,) = engine.entries(scope)
    assert not entry.has_own_lifetime

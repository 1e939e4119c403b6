"""Documents that stand anywhere: each is read wherever it stands, to the token; nothing exact finds
what is computed behind them, and they are forked, preempted and brought back like all else."""

import random
from typing import Any

import pytest

from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.cache.store_tier import StoreTier
from engine.clock import ManualClock
from engine.protocol import Blocks, ChainGone, ChainHeld, HeldName, InputUsage, LeaseEnded, Ttl
from tests.engine.schedule.harness import Harness, Sent, occupied, words

HEAD = words(0, 9)
A, B, C = (words(1000 * number, 21 + number) for number in (1, 2, 3))
ALL: dict[int, Ttl] = {1: "5m", 2: "5m", 3: "5m"}


def usage_of(sent: Sent) -> InputUsage:
    assert sent.started is not None
    return sent.started.usage


def test_documents_in_another_order_are_read_but_for_what_is_recomputed() -> None:
    engine = Harness(num_blocks=128)
    first = engine.send(HEAD, A, B, C, words(100, 5), documents=ALL)
    engine.finish(first)
    # Of 22, 23 and 24 tokens three each are computed where they stand.
    copied = 19 + 20 + 21
    rest = 9 + 9 + 6
    usage = usage_of(first)
    assert (usage.cache_write_5m_tokens, usage.input_tokens) == (copied, rest)
    assert (usage.cache_read_tokens, usage.computed_tokens) == (0, copied + rest)
    second = engine.send(HEAD, C, A, B, words(200, 5), documents=ALL)
    engine.finish(second)
    usage = usage_of(second)
    assert (usage.cache_read_tokens, usage.cache_write_5m_tokens) == (copied, 0)
    # The first eight tokens are a block that both prompts begin with.
    assert (usage.automatic_tokens, usage.computed_tokens) == (8, rest - 8)
    for sent in (first, second):
        assert sent.started is not None
        assert sent.started.approximate == Blocks(documents=3, reused=copied, recomputed=9)
    assert {(entry.tokens, entry.is_leased) for entry in engine.entries.live()} == {
        (23, True),
        (24, True),
        (25, True),
    }
    engine.check_idle()


@pytest.mark.parametrize("num_blocks", [58, 70, 80])
def test_what_is_held_of_a_document_needs_no_room_again_and_ends_no_lease(num_blocks: int) -> None:
    engine = Harness(num_blocks=num_blocks, block_size=4, max_step_tokens=64, lease_share=0.7)
    engine.finish(engine.send(words(500, 30), marks={0: "5m"}, scope="other"))
    document = words(1000, 99)
    engine.finish(engine.send(HEAD, document, words(100, 5), documents={1: "5m"}))
    before = [entry.is_leased for entry in engine.entries.live()]
    again = engine.send(words(0, 1), words(50, 9), document, words(200, 5), documents={2: "5m"})
    engine.finish(again)
    assert usage_of(again).cache_read_tokens == 96
    assert [entry.is_leased for entry in engine.entries.live()] == before
    engine.check_idle()


def test_a_share_is_computed_wherever_it_is_chosen_and_counted_to_the_token() -> None:
    engine = Harness(num_blocks=128)
    first = engine.send(HEAD, A, B, words(100, 5), documents={1: "5m", 2: "5m"}, recompute=0.3)
    engine.finish(first)
    # Of 22 and 23 tokens seven each are computed where they stand.
    usage = usage_of(first)
    assert (usage.cache_write_5m_tokens, usage.input_tokens) == (15 + 16, 9 + 14 + 6)
    assert usage.computed_tokens == 60
    before = len(engine.runner.steps)
    second = engine.send(HEAD, B, A, words(200, 5), documents={1: "5m", 2: "5m"}, recompute=0.3)
    engine.finish(second)
    usage = usage_of(second)
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (31, 8)
    assert usage.computed_tokens == 60 - 31 - 8
    works = [work for step in engine.runner.steps[before:] for work in step]
    assert sum(len(work.token_ids) for work in works) == 60 - 31 - 8 + 3
    for sent in (first, second):
        assert sent.started is not None
        assert sent.started.approximate == Blocks(documents=2, reused=31, recomputed=14)
    # Another share is another kind; the documents' entries are the same.
    other = engine.send(HEAD, A, B, words(100, 5), documents={1: "5m", 2: "5m"}, recompute=0.2)
    engine.finish(other)
    usage = usage_of(other)
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (17 + 18, 8)
    engine.check_idle()


def test_a_share_of_a_document_that_is_there_in_part_is_chosen_of_all_of_it() -> None:
    engine = Harness(num_blocks=80)
    ask: dict[str, Any] = {"documents": {1: "5m"}, "recompute": 0.3}
    first = engine.send(HEAD, A, words(100, 5), **ask)
    engine.finish(first)
    for digest in first.state.query.digests.full[4:6]:
        block = engine.pool.peek(digest)
        assert block is not None
        engine.pool.forget(block)
    again = engine.send(HEAD, A, words(100, 5), **ask)
    engine.finish(again)
    assert usage_of(again).cache_read_tokens == 15


def test_the_same_prompt_again_reads_them_from_its_own_blocks() -> None:
    engine = Harness(num_blocks=128)
    for _ in range(2):
        sent = engine.send(HEAD, A, words(100, 5), documents={1: "5m"})
        engine.finish(sent)
    usage = usage_of(sent)
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (19, 36 - 19)
    assert [entry.reads for entry in engine.entries.live()] == [1]


def test_what_is_computed_is_what_was_not_in_memory() -> None:
    engine = Harness(num_blocks=128)
    engine.finish(engine.send(HEAD, A, words(100, 5), documents={1: "5m"}))
    before = len(engine.runner.steps)
    engine.finish(engine.send(words(0, 1), words(50, 6), A, words(100, 5), documents={2: "5m"}))
    computed = sum(len(w.token_ids) for step in engine.runner.steps[before:] for w in step)
    assert computed == 1 + 6 + 3 + 6 + 3  # and three of four sampled tokens


def test_nothing_exact_finds_what_stands_behind_a_document() -> None:
    engine = Harness(num_blocks=128)
    placed = engine.send(HEAD, A, words(100, 9), marks={2: "5m"}, documents={1: "5m"})
    engine.finish(placed)
    exact = engine.send(HEAD, A, words(100, 9), marks={2: "5m"})
    engine.finish(exact)
    usage = usage_of(exact)
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 12)
    assert exact.started is not None and exact.started.approximate is None
    forged = engine.send(placed.state.query.tokens[:40], marks={0: "5m"})
    engine.finish(forged)
    assert (usage_of(forged).cache_read_tokens, usage_of(forged).automatic_tokens) == (0, 12)
    other = engine.send(HEAD, A, words(100, 9), marks={2: "5m"}, documents={1: "5m"}, recompute=4)
    engine.finish(other)
    # The document's entry is read with any number, what was computed behind it with the same one.
    assert usage_of(other).cache_read_tokens == 18


def test_a_document_is_an_exact_entry() -> None:
    engine = Harness()
    engine.finish(engine.send(HEAD, A, words(100, 5), documents={1: "5m"}))
    exact = engine.send([HEAD[0], *A], words(300, 4), marks={0: "5m"})
    engine.finish(exact)
    assert usage_of(exact).cache_read_tokens == 23
    later = engine.send(words(0, 1), words(500, 5), A, words(100, 5), documents={2: "1h"})
    engine.finish(later)
    assert usage_of(later).cache_read_tokens == 19


def test_an_entry_of_the_prompt_is_read_whole_and_a_new_document_behind_it() -> None:
    engine = Harness(num_blocks=128)
    first = engine.send(HEAD, A, words(100, 7), marks={2: "1h"}, documents={1: "5m"})
    engine.finish(first)
    usage = usage_of(first)
    # The prompt's own entry has the document too, for longer.
    assert (usage.cache_write_1h_tokens, usage.cache_write_5m_tokens) == (38, 0)
    grown = engine.send(
        HEAD, A, words(100, 7), B, words(300, 4), marks={2: "1h"}, documents={1: "5m", 3: "5m"}
    )
    engine.finish(grown)
    usage = usage_of(grown)
    assert (usage.cache_read_tokens, usage.cache_write_5m_tokens) == (38, 20)
    assert (usage.input_tokens, usage.automatic_tokens) == (3 + 5, 0)


def test_scopes_are_apart() -> None:
    engine = Harness(num_blocks=128)
    engine.finish(engine.send(HEAD, A, words(100, 5), documents={1: "5m"}, scope="a"))
    other = engine.send(HEAD, A, words(100, 5), documents={1: "5m"}, scope="b")
    engine.finish(other)
    assert (usage_of(other).cache_read_tokens, usage_of(other).automatic_tokens) == (0, 0)


def test_each_has_a_name_while_it_is_held_and_one_for_the_receipt() -> None:
    engine = Harness(num_blocks=40, lease_share=1.0)
    sent = engine.send(HEAD, A, B, words(100, 5), documents={1: "5m", 2: "1h"})
    engine.finish(sent)
    held = [event for event in engine.events if isinstance(event, ChainHeld)]
    # The first token and the document, in whole blocks.
    told = [(*event.names, event.num_leased) for event in held]
    assert told == [(HeldName("1000", 20), 1), (HeldName("2000", 24), 1)]
    assert sent.started is not None
    assert sent.started.receipt.copied == [(12, 31), (34, 54)]
    engine.clock.advance(301)
    engine.finish(occupied(engine, 30, max_tokens=4))
    gone = [event.names for event in engine.events if isinstance(event, LeaseEnded | ChainGone)]
    assert gone == [["1000"], ["1000"]], "its lease, then its blocks"


def test_choices_go_on_behind_documents() -> None:
    engine = Harness(num_blocks=128)
    engine.finish(engine.send(HEAD, A, B, words(100, 3), documents={1: "5m", 2: "5m"}, choices=3))
    engine.check_idle()


def test_a_cancelled_turn_leaves_nothing_behind() -> None:
    engine = Harness(num_blocks=128, max_step_tokens=8)
    for num_steps in range(1, 30):
        shifted = [word + num_steps * 7 for word in A]
        sent = engine.send(HEAD, shifted, B, words(100, 5), documents={1: "5m", 2: "5m"})
        engine.step(num_steps)
        engine.loop.cancel(sent.state.request_id)
        engine.step()
        assert engine.pool.counts().active == 0
    engine.check_idle()


def test_memory_for_the_documents_is_waited_for() -> None:
    engine = Harness(num_blocks=32)
    long = occupied(engine, 12, max_tokens=20)
    sent = engine.send(HEAD, A, B, words(100, 5), documents={1: "5m", 2: "5m"})
    engine.finish(long, sent)
    assert usage_of(sent).cache_write_5m_tokens == 39
    engine.check_idle()


def test_a_document_whose_file_is_lost_is_computed_again() -> None:
    pool, hasher = BlockPool(64, 4), ChainHasher(b"key", 4)
    store = StoreTier(64, 4, hasher, bytes.hex, lower_than=[pool])
    cache = PrefixCache(pool, Entries(pool, lease_share=0.5), hasher, store=store)
    clock = ManualClock()
    engine = Harness(cache=cache, clock=clock)
    engine.finish(engine.send(HEAD, A, words(100, 5), documents={1: "5m"}))
    (entry,) = engine.entries.live()
    store.want(entry)
    for save in store.take_saves(64):
        store.written(save.key.name, is_good=True)
    stored = store.copy_of(entry)
    clock.advance(301)
    engine.finish(engine.send(words(500, 230), scope="other"))
    store.end(entry)
    sent = engine.send(HEAD, A, words(300, 3), documents={1: "5m"})
    engine.step()
    for block in stored:
        store.forget(block)
    engine.finish(sent)
    assert usage_of(sent).cache_read_tokens == 0
    engine.check_idle()


@pytest.mark.parametrize("host_blocks", [0, 96])
def test_random_turns_of_both_kinds_answer_as_they_would_alone(host_blocks: int) -> None:
    # In life 1047 requests that wait hold what a document needs.
    read = [read_in_a_random_life(seed, host_blocks) for seed in (1047, *range(40))]
    assert min(sum(exact for exact, _ in read), sum(placed for _, placed in read)) > 300


def read_in_a_random_life(seed: int, host_blocks: int) -> tuple[int, int]:
    """The tokens that were read by exact turns and by those with documents."""
    rng = random.Random(seed)
    engine = Harness(
        num_blocks=rng.choice([40, 80]),
        host_blocks=host_blocks,
        max_step_tokens=rng.choice([8, 16, 64]),
        max_running=rng.choice([2, 4]),
        max_waiting=100,
        lease_share=rng.choice([0.2, 0.5]),
    )
    texts = [words(1000 * number, rng.randint(8, 20)) for number in range(4)]
    sent: list[Sent] = []
    ttls: tuple[Ttl, ...] = ("5m", "1h")
    for _ in range(25):
        segments = [rng.choice(texts[:3]), *(rng.choice(texts) for _ in range(rng.randint(0, 2)))]
        marked = rng.sample(range(len(segments)), rng.randint(0, len(segments)))
        placed = rng.sample(range(1, len(segments)), rng.randint(0, len(segments) - 1))
        sent.append(
            engine.send(
                *segments,
                marks={index: rng.choice(ttls) for index in sorted(marked)},
                max_tokens=rng.choice([1, 4, 30]),
                choices=rng.choice([1, 1, 1, 3]),
                scope=rng.choice("ab"),
                seed=rng.randint(1, 9),
                service_class=rng.choice(["interactive", "interactive", "batch"]),
                documents={index: rng.choice(ttls) for index in placed},
                recompute=rng.choice([0, 3, 3, 0.2, 0.2, 7]),
            )
        )
        engine.step(rng.randint(0, 8))
        if rng.random() < 0.1:
            engine.loop.cancel(rng.choice(sent).state.request_id)
    engine.finish(*sent)
    engine.check_idle()
    read = [0, 0]
    for one in sent:
        if one.started is not None:
            read[bool(one.state.query.placed)] += usage_of(one).cache_read_tokens
    return read[0], read[1]

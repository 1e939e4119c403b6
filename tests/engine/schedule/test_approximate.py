"""Approximate prompts are found, shared, forked, preempted and brought back like exact ones, and
neither kind is ever found by the other.

Of a compressed prompt the beginning is kept in part. Documents stand anywhere: each is read
wherever it stands, to the token.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import pytest

from engine.approximate.request import ApproximateRequest
from engine.cache.block import Block
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.cache.store_tier import StoreTier
from engine.clock import ManualClock
from engine.protocol import ChainGone, ChainHeld, FromDocuments, HeldName, LeaseEnded, Ttl
from tests.engine.schedule.harness import Harness, Sent, occupied, words

HEAD = words(0, 9)
A, B, C = (words(1000 * number, 21 + number) for number in (1, 2, 3))
ALL: dict[int, Ttl] = {1: "5m", 2: "5m", 3: "5m"}
TTLS: tuple[Ttl, ...] = ("5m", "1h")
ASKED = ({"marks": {0: "5m"}, "keep": (0, 0.5)}, {"documents": {1: "5m"}})
KEPT_OR_PLACED = pytest.mark.parametrize("options", ASKED, ids=["kept", "placed"])


def below(*segments: Sequence[int], **more: Any) -> tuple[Harness, StoreTier, list[Block]]:
    """An engine, its store, and the blocks that this has of an entry that is over."""
    pool = BlockPool(64, 4)
    hasher = ChainHasher(b"key", 4)
    store = StoreTier(64, 4, hasher, bytes.hex, lower_than=[pool])
    cache = PrefixCache(pool, Entries(pool, lease_share=0.5), hasher, store=store)
    clock = ManualClock()
    engine = Harness(cache=cache, clock=clock)
    engine.done(*segments, **more)
    (entry,) = engine.entries.live()
    store.want(entry)
    for save in store.take_saves(64):
        store.written(save.key.name, is_good=True)
    stored = store.copy_of(entry)
    clock.advance(301)
    engine.done(words(500, 230), scope="other")
    store.end(entry)
    return engine, store, stored


# Both kinds.


@KEPT_OR_PLACED
def test_scopes_are_apart(options: dict[str, Any]) -> None:
    engine = Harness(num_blocks=128)
    text = (words(0, 40), A, words(100, 5))
    engine.done(*text, scope="a", **options)
    foreign = engine.done(*text, scope="b", **options)
    assert (foreign.usage.cache_read_tokens, foreign.usage.automatic_tokens) == (0, 0)


@KEPT_OR_PLACED
def test_choices_go_on_behind_it(options: dict[str, Any]) -> None:
    engine = Harness(num_blocks=128)
    turn = engine.done(words(0, 40), A, words(100, 3), choices=3, **options)
    assert turn.usage.computed_tokens == 40 + len(A) + 4
    engine.check_idle()


def test_what_is_kept_in_part_and_nobody_asked_to_hold_is_read_and_gives_way() -> None:
    engine = Harness(num_blocks=64)
    text = (words(0, 80), words(100, 5))
    options: dict[str, Any] = {"marks": {0: "5m"}, "keep": (0, 0.5), "hold": False}
    engine.done(*text, **options)
    (entry,) = engine.entries.live()
    assert (entry.state, entry.why_unleased) == ("best_effort", "automatic")
    assert not engine.pool.num_leased
    assert engine.done(*text, **options).usage.cache_read_tokens == 80
    for number in range(8):
        engine.done(words(1000 * (number + 1), 100))
    assert engine.done(*text, **options).usage.cache_read_tokens == 0
    # A mark leases it, and the same flood takes nothing.
    engine.done(*text, **options | {"hold": True})
    (entry,) = engine.entries.live()
    assert entry.is_leased
    for number in range(8):
        engine.done(words(1000 * (number + 1), 100))
    assert engine.done(*text, **options).usage.cache_read_tokens == 80
    engine.check_idle()


def test_a_cancelled_turn_leaves_nothing_behind() -> None:
    engine = Harness(num_blocks=128, max_step_tokens=8)
    for num_steps in range(1, 30):
        shifted = [word + num_steps * 7 for word in A]
        for ask in (
            partial(engine.send, words(1000 * num_steps, 40), marks={0: "5m"}, keep=(0, 0.5)),
            partial(engine.send, HEAD, shifted, B, documents={1: "5m", 2: "5m"}),
        ):
            turn = ask()
            engine.step(num_steps)
            engine.loop.cancel(turn.state.request_id)
            engine.step()
            assert engine.pool.counts().active == 0
    engine.check_idle()


@pytest.mark.parametrize("host_blocks", [0, 96])
@pytest.mark.parametrize("kind", ["kept", "placed"])
def test_random_turns_of_both_kinds_answer_as_they_would_alone(
    kind: Literal["kept", "placed"], host_blocks: int
) -> None:
    # In life 1047 requests that wait hold what a document needs.
    lives = [read_in_a_random_life(kind, seed, host_blocks) for seed in (1047, *range(50))]
    assert min(sum(exact for exact, _ in lives), sum(approximate for _, approximate in lives)) > 300


def read_in_a_random_life(
    kind: Literal["kept", "placed"], seed: int, host_blocks: int
) -> tuple[int, int]:
    """The tokens that were read by exact and by approximate turns."""
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
    turns: list[Sent] = []
    for _ in range(25):
        segments = [rng.choice(texts[:3]), *(rng.choice(texts) for _ in range(rng.randint(0, 2)))]
        marked = rng.sample(range(len(segments)), rng.randint(0, len(segments)))
        placed = list[int]()
        keep = None
        if kind == "placed":
            placed = rng.sample(range(1, len(segments)), rng.randint(0, len(segments) - 1))
        elif marked and rng.random() < 0.6:
            keep = (rng.choice(marked), rng.choice([0.25, 0.5]))
        options: dict[str, Any] = {
            "marks": {index: rng.choice(TTLS) for index in sorted(marked)},
            "max_tokens": rng.choice([1, 4, 30]),
            "choices": rng.choice([1, 1, 1, 3]),
            "scope": rng.choice("ab"),
            "seed": rng.randint(1, 9),
            "service_class": rng.choice(["interactive", "interactive", "batch"]),
            "keep": keep,
        }
        if kind == "placed":
            options["documents"] = {index: rng.choice(TTLS) for index in placed}
            options["recompute"] = rng.choice([0, 3, 3, 0.2, 0.2, 7])
        turns.append(engine.send(*segments, **options))
        engine.step(rng.randint(0, 8))
        if rng.random() < 0.1:
            engine.loop.cancel(rng.choice(turns).state.request_id)
    engine.finish(*turns)
    engine.check_idle()
    read_tokens = [0, 0]
    for turn in turns:
        if turn.started is not None:
            read_tokens[isinstance(turn.state, ApproximateRequest)] += turn.usage.cache_read_tokens
    return read_tokens[0], read_tokens[1]


# Compressed prompts.


def test_the_first_turn_writes_the_whole_prefix_and_the_next_reads_it() -> None:
    engine = Harness()
    first = engine.done(words(0, 40), words(100, 5), marks={0: "5m"}, keep=(0, 0.5))
    usage = first.usage
    assert (usage.cache_write_5m_tokens, usage.input_tokens, usage.computed_tokens) == (40, 6, 46)
    second = engine.done(words(0, 40), words(200, 5), marks={0: "5m"}, keep=(0, 0.5))
    usage = second.usage
    assert (usage.cache_read_tokens, usage.input_tokens, usage.computed_tokens) == (40, 6, 6)
    for turn in (first, second):
        assert turn.begun.approximate is not None
        assert (turn.started.approximate.kept, turn.started.approximate.of) == (20, 40)
    # Half of the blocks are leased.
    (entry,) = engine.entries.live()
    assert (entry.is_leased, len(entry.blocks)) == (True, 5)
    engine.check_idle()


def test_neither_kind_reads_the_other() -> None:
    engine = Harness()
    engine.done(words(0, 40), words(100, 5), marks={0: "5m"}, keep=(0, 0.5))
    exact = engine.done(words(0, 40), words(100, 5), marks={0: "5m"})
    assert exact.usage.cache_read_tokens == 0
    assert exact.begun.approximate is None
    # The exact beginning that was computed before may still be in memory: that is no read.
    assert exact.usage.automatic_tokens == 40
    other_kind = engine.done(words(0, 40), words(100, 5), marks={0: "5m"}, keep=(0, 0.25))
    assert other_kind.usage.cache_read_tokens == 0


def test_an_exact_prompt_of_the_tokens_that_stand_for_what_is_kept_finds_nothing() -> None:
    engine = Harness()
    first = engine.done(words(0, 40), words(100, 5), marks={0: "5m"}, keep=(0, 0.5))
    forged = engine.done(first.state.query.tokens[:20], words(100, 5), marks={0: "5m"})
    usage = forged.usage
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 0)


def test_what_follows_inherits_the_kind() -> None:
    engine = Harness()
    document = words(0, 40)
    marks: dict[int, Ttl] = {0: "1h", 1: "5m"}
    engine.done(document, words(100, 5), marks=marks, keep=(0, 0.5))
    again = engine.done(document, words(100, 5), words(200, 3), marks=marks, keep=(0, 0.5))
    assert again.usage.cache_read_tokens == 45
    exact = engine.done(document, words(100, 5), words(200, 3), marks=marks)
    assert exact.usage.cache_read_tokens == 0


def test_a_twin_waits_and_is_told_that_it_wrote() -> None:
    engine = Harness()
    twins = [
        engine.send(words(0, 48), words(100 * number, 3), marks={0: "5m"}, keep=(0, 0.5))
        for number in (1, 2)
    ]
    engine.finish(*twins)
    assert twins[1].usage.computed_tokens == 4
    assert twins[1].usage.cache_write_5m_tokens == 48


def test_a_mark_in_front_holds_nothing() -> None:
    engine = Harness()
    marks: dict[int, Ttl] = {0: "1h", 1: "5m"}
    turn = engine.done(words(0, 8), words(50, 40), words(100, 5), marks=marks, keep=(1, 0.5))
    assert [(point.state, point.reason) for point in turn.begun.breakpoints] == [
        ("none", "no_boundary"),
        ("leased", None),
    ]


def test_a_chunk_of_a_prompt_whose_file_is_lost_is_not_computed() -> None:
    document = words(0, 80)
    engine, store, stored = below(document, marks={0: "5m"})
    # What is left lies behind a hole of three steps.
    for block in stored[:12]:
        store.forget(block)
    turn = engine.send(document, words(300, 3), marks={0: "5m"}, keep=(0, 0.5))
    engine.step()
    lost = list(turn.state.leader.table.arriving())
    assert len(lost) == 8
    for block in lost:
        store.forget(block)
    engine.finish(turn)
    engine.check_idle()


def test_a_step_compresses_a_part_of_one_prompt_and_batches_come_last() -> None:
    engine = Harness(num_blocks=256, max_step_tokens=64)
    parts = 0

    def counted(steps: Iterator[int]) -> Iterator[int]:
        nonlocal parts
        for step in steps:
            parts += 1
            yield step

    plain = engine.runner.compress
    engine.runner.compress = lambda *how: counted(plain(*how))  # type: ignore[method-assign]
    sents = [
        engine.send(
            words(1000 * number, 40),
            marks={0: "5m"},
            keep=(0, 0.5),
            service_class="batch" if number < 2 else "interactive",
        )
        for number in range(4)
    ]
    while not all(turn.is_over for turn in sents):
        before = parts
        engine.step()
        assert parts <= before + 1
        if parts > before and any(turn.started is None for turn in sents[2:]):
            assert all(turn.state.leader.parts is None for turn in sents[:2])
    assert parts == 20
    engine.finish(*sents)


def test_compressing_teaches_no_pace() -> None:
    clock = ManualClock()
    engine = Harness(clock=clock)
    seconds: list[float] = []
    plain = engine.runner.compress

    def slow(*how: Any) -> Iterator[int]:
        for step in plain(*how):
            clock.advance(5.0)
            yield step

    engine.runner.compress = slow  # type: ignore[method-assign]
    learn = engine.scheduler.computed
    engine.scheduler.computed = lambda chunks, took: (  # type: ignore[method-assign]
        seconds.append(took),
        learn(chunks, took),
    )[1]
    engine.done(words(0, 40), marks={0: "5m"}, keep=(0, 0.5))
    assert seconds and max(seconds) == 0


def test_the_exact_beginning_is_computed_in_the_chunks_of_an_exact_prompt() -> None:
    def chunks(keep: tuple[int, float] | None) -> list[tuple[int, int]]:
        engine = Harness(max_step_tokens=32)
        marks: dict[int, Ttl] = {0: "1h", 1: "1h", 2: "5m"}
        texts = [words(0, 10), words(100, 30), words(200, 7)]
        engine.done(*texts, marks=marks, keep=keep)
        works = [work for step in engine.runner.steps for work in step if not work.cut]
        return [(work.start, len(work.token_ids)) for work in works if work.start < 40]

    assert chunks((1, 0.5)) == chunks(None)


def test_names_tell_tokens_of_the_whole_prompt() -> None:
    engine = Harness()
    turn = engine.done(
        words(0, 8),
        words(50, 32),
        words(100, 8),
        marks={1: "1h", 2: "5m"},
        keep=(1, 0.5),
        has_names=True,
    )
    assert turn.begun.receipt.name_tokens == [8, 40, 48]
    events = [event for event in engine.events if isinstance(event, ChainHeld)]
    assert [name.tokens for event in events for name in event.names] == [40, 48]


@pytest.mark.parametrize("num_others", range(18, 28))
def test_what_is_held_of_a_prompt_need_not_be_its_beginning(num_others: int) -> None:
    """Of two copies either may have the blocks that are found; room is waited for all the same."""
    engine = Harness(max_step_tokens=40)
    prefix = words(0, 80)
    short = engine.send(words(0, 16), marks={0: "5m"}, keep=(0, 0.5))
    engine.finish(short, engine.send(prefix, marks={0: "1h"}))
    digests = engine.cache.digests("s", prefix)
    blocks = map(engine.pool.peek, digests.full)
    is_held = [block is not None and block.ref_count > 0 for block in blocks]
    assert is_held == [False] * 4 + [True] * 16
    long = occupied(engine, num_others, max_tokens=12)
    turn = engine.send(prefix, words(300, 3), marks={0: "5m"}, keep=(0, 0.5))
    engine.finish(long, turn)
    engine.check_idle()


# Documents.


def test_documents_in_another_order_are_read_but_for_what_is_recomputed() -> None:
    engine = Harness(num_blocks=128)
    first = engine.done(HEAD, A, B, C, words(100, 5), documents=ALL)
    # Of 22, 23 and 24 tokens three each are computed where they stand.
    copied = 19 + 20 + 21
    num_rest = 9 + 9 + 6
    usage = first.usage
    assert (usage.cache_write_5m_tokens, usage.input_tokens) == (copied, num_rest)
    assert (usage.cache_read_tokens, usage.computed_tokens) == (0, copied + num_rest)
    second = engine.done(HEAD, C, A, B, words(200, 5), documents=ALL)
    usage = second.usage
    assert (usage.cache_read_tokens, usage.cache_write_5m_tokens) == (copied, 0)
    # The first eight tokens are a block that both prompts begin with.
    assert (usage.automatic_tokens, usage.computed_tokens) == (8, num_rest - 8)
    for turn in (first, second):
        assert turn.begun.approximate == FromDocuments(documents=3, reused=copied, recomputed=9)
    assert {(entry.tokens, entry.is_leased) for entry in engine.entries.live()} == {
        (23, True),
        (24, True),
        (25, True),
    }
    engine.check_idle()


@pytest.mark.parametrize("num_blocks", [58, 70, 80])
def test_what_is_held_of_a_document_needs_no_room_again_and_ends_no_lease(num_blocks: int) -> None:
    engine = Harness(num_blocks=num_blocks, block_size=4, max_step_tokens=64, lease_share=0.7)
    engine.done(words(500, 30), marks={0: "5m"}, scope="other")
    document = words(1000, 99)
    engine.done(HEAD, document, words(100, 5), documents={1: "5m"})
    before = [entry.is_leased for entry in engine.entries.live()]
    again = engine.done(words(0, 1), words(50, 9), document, words(200, 5), documents={2: "5m"})
    assert again.usage.cache_read_tokens == 96
    assert [entry.is_leased for entry in engine.entries.live()] == before
    engine.check_idle()


def test_a_share_is_computed_wherever_it_is_chosen_and_counted_to_the_token() -> None:
    engine = Harness(num_blocks=128)
    first = engine.done(HEAD, A, B, words(100, 5), documents={1: "5m", 2: "5m"}, recompute=0.3)
    # Of 22 and 23 tokens seven each are computed where they stand.
    usage = first.usage
    assert (usage.cache_write_5m_tokens, usage.input_tokens) == (15 + 16, 9 + 14 + 6)
    assert usage.computed_tokens == 60
    before = len(engine.runner.steps)
    second = engine.done(HEAD, B, A, words(200, 5), documents={1: "5m", 2: "5m"}, recompute=0.3)
    usage = second.usage
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (31, 8)
    assert usage.computed_tokens == 60 - 31 - 8
    works = [work for step in engine.runner.steps[before:] for work in step]
    assert sum(len(work.token_ids) for work in works) == 60 - 31 - 8 + 3
    for turn in (first, second):
        assert turn.begun.approximate == FromDocuments(documents=2, reused=31, recomputed=14)
    # Another share is another kind; the documents' entries are the same.
    reordered = engine.done(HEAD, A, B, words(100, 5), documents={1: "5m", 2: "5m"}, recompute=0.2)
    usage = reordered.usage
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (17 + 18, 8)
    engine.check_idle()


def test_a_share_of_a_document_that_is_there_in_part_is_chosen_of_all_of_it() -> None:
    engine = Harness(num_blocks=80)
    ask: dict[str, Any] = {"documents": {1: "5m"}, "recompute": 0.3}
    first = engine.done(HEAD, A, words(100, 5), **ask)
    for digest in first.state.query.digests.full[4:6]:
        block = engine.pool.peek(digest)
        assert block is not None
        engine.pool.forget(block)
    again = engine.done(HEAD, A, words(100, 5), **ask)
    assert again.usage.cache_read_tokens == 15


def test_the_same_prompt_again_reads_them_from_its_own_blocks() -> None:
    engine = Harness(num_blocks=128)
    for _ in range(2):
        turn = engine.done(HEAD, A, words(100, 5), documents={1: "5m"})
    usage = turn.usage
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (19, 36 - 19)
    assert [entry.reads for entry in engine.entries.live()] == [1]


def test_what_is_computed_is_what_was_not_in_memory() -> None:
    engine = Harness(num_blocks=128)
    engine.done(HEAD, A, words(100, 5), documents={1: "5m"})
    before = len(engine.runner.steps)
    engine.done(words(0, 1), words(50, 6), A, words(100, 5), documents={2: "5m"})
    computed = sum(len(w.token_ids) for step in engine.runner.steps[before:] for w in step)
    assert computed == 1 + 6 + 3 + 6 + 3  # and three of four sampled tokens


def test_nothing_exact_finds_what_stands_behind_a_document() -> None:
    engine = Harness(num_blocks=128)
    placed = engine.done(HEAD, A, words(100, 9), marks={2: "5m"}, documents={1: "5m"})
    exact = engine.done(HEAD, A, words(100, 9), marks={2: "5m"})
    usage = exact.usage
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 12)
    assert exact.begun.approximate is None
    forged = engine.done(placed.state.query.tokens[:40], marks={0: "5m"})
    assert (forged.usage.cache_read_tokens, forged.usage.automatic_tokens) == (0, 12)
    exact_turn = engine.done(
        HEAD, A, words(100, 9), marks={2: "5m"}, documents={1: "5m"}, recompute=4
    )
    # The document's entry is read with any number, what was computed behind it with the same one.
    assert exact_turn.usage.cache_read_tokens == 18


def test_a_document_is_an_exact_entry() -> None:
    engine = Harness()
    engine.done(HEAD, A, words(100, 5), documents={1: "5m"})
    exact = engine.done([HEAD[0], *A], words(300, 4), marks={0: "5m"})
    assert exact.usage.cache_read_tokens == 23
    later = engine.done(words(0, 1), words(500, 5), A, words(100, 5), documents={2: "1h"})
    assert later.usage.cache_read_tokens == 19


def test_an_entry_of_the_prompt_is_read_whole_and_a_new_document_behind_it() -> None:
    engine = Harness(num_blocks=128)
    first = engine.done(HEAD, A, words(100, 7), marks={2: "1h"}, documents={1: "5m"})
    usage = first.usage
    # The prompt's own entry has the document too, for longer.
    assert (usage.cache_write_1h_tokens, usage.cache_write_5m_tokens) == (38, 0)
    grown = engine.done(
        HEAD, A, words(100, 7), B, words(300, 4), marks={2: "1h"}, documents={1: "5m", 3: "5m"}
    )
    usage = grown.usage
    assert (usage.cache_read_tokens, usage.cache_write_5m_tokens) == (38, 20)
    assert (usage.input_tokens, usage.automatic_tokens) == (3 + 5, 0)


def test_each_has_a_name_while_it_is_held_and_one_for_the_receipt() -> None:
    engine = Harness(num_blocks=40, lease_share=1.0)
    turn = engine.done(HEAD, A, B, words(100, 5), documents={1: "5m", 2: "1h"})
    events = [event for event in engine.events if isinstance(event, ChainHeld)]
    # The first token and the document, in whole blocks.
    chains = [(*event.names, event.num_leased) for event in events]
    assert chains == [(HeldName("1000", 20), 1), (HeldName("2000", 24), 1)]
    assert turn.begun.receipt.copied == [(12, 31), (34, 54)]
    engine.clock.advance(301)
    engine.finish(occupied(engine, 30, max_tokens=4))
    gone = [event.names for event in engine.events if isinstance(event, LeaseEnded | ChainGone)]
    assert gone == [["1000"], ["1000"]], "its lease, then its blocks"


def test_memory_for_the_documents_is_waited_for() -> None:
    engine = Harness(num_blocks=32)
    long = occupied(engine, 12, max_tokens=20)
    turn = engine.send(HEAD, A, B, words(100, 5), documents={1: "5m", 2: "5m"})
    engine.finish(long, turn)
    assert turn.usage.cache_write_5m_tokens == 39
    engine.check_idle()


def test_a_document_whose_file_is_lost_is_computed_again() -> None:
    engine, store, stored = below(HEAD, A, words(100, 5), documents={1: "5m"})
    turn = engine.send(HEAD, A, words(300, 3), documents={1: "5m"})
    engine.step()
    for block in stored:
        store.forget(block)
    engine.finish(turn)
    assert turn.usage.cache_read_tokens == 0
    engine.check_idle()

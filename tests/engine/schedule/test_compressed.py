"""Compressed prompts: what is kept is found, shared, forked, preempted and brought back like blocks
of exact ones, and neither kind is ever found by the other."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.cache.store_tier import StoreTier
from engine.clock import ManualClock
from engine.protocol import ChainHeld, InputUsage, Ttl
from tests.engine.schedule.harness import Harness, Sent, occupied, words

ENDS: tuple[Ttl, ...] = ("5m", "1h")


def usage_of(sent: Sent) -> InputUsage:
    assert sent.started is not None
    return sent.started.usage


def test_the_first_turn_writes_the_whole_prefix_and_the_next_reads_it() -> None:
    engine = Harness()
    first = engine.send(words(0, 40), words(100, 5), marks={0: "5m"}, keep=(0, 0.5))
    engine.finish(first)
    usage = usage_of(first)
    assert (usage.cache_write_5m_tokens, usage.input_tokens, usage.computed_tokens) == (40, 6, 46)
    second = engine.send(words(0, 40), words(200, 5), marks={0: "5m"}, keep=(0, 0.5))
    engine.finish(second)
    usage = usage_of(second)
    assert (usage.cache_read_tokens, usage.input_tokens, usage.computed_tokens) == (40, 6, 6)
    for sent in (first, second):
        assert sent.started is not None and sent.started.approximate is not None
        assert (sent.started.approximate.kept, sent.started.approximate.of) == (20, 40)
    # Half of the blocks are leased.
    (entry,) = engine.entries.live()
    assert (entry.is_leased, len(entry.blocks)) == (True, 5)
    engine.check_idle()


def test_neither_kind_reads_the_other() -> None:
    engine = Harness()
    engine.finish(engine.send(words(0, 40), words(100, 5), marks={0: "5m"}, keep=(0, 0.5)))
    exact = engine.send(words(0, 40), words(100, 5), marks={0: "5m"})
    engine.finish(exact)
    assert usage_of(exact).cache_read_tokens == 0
    assert exact.started is not None and exact.started.approximate is None
    # The exact beginning that was computed before may still be in memory: that is no read.
    assert usage_of(exact).automatic_tokens == 40
    other = engine.send(words(0, 40), words(100, 5), marks={0: "5m"}, keep=(0, 0.25))
    engine.finish(other)
    assert usage_of(other).cache_read_tokens == 0


def test_an_exact_prompt_of_the_tokens_that_stand_for_what_is_kept_finds_nothing() -> None:
    engine = Harness()
    first = engine.send(words(0, 40), words(100, 5), marks={0: "5m"}, keep=(0, 0.5))
    engine.finish(first)
    forged = engine.send(first.state.query.tokens[:20], words(100, 5), marks={0: "5m"})
    engine.finish(forged)
    usage = usage_of(forged)
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 0)


def test_what_follows_inherits_the_kind() -> None:
    engine, document = Harness(), words(0, 40)
    marks: dict[int, Ttl] = {0: "1h", 1: "5m"}
    engine.finish(engine.send(document, words(100, 5), marks=marks, keep=(0, 0.5)))
    again = engine.send(document, words(100, 5), words(200, 3), marks=marks, keep=(0, 0.5))
    engine.finish(again)
    assert usage_of(again).cache_read_tokens == 45
    exact = engine.send(document, words(100, 5), words(200, 3), marks=marks)
    engine.finish(exact)
    assert usage_of(exact).cache_read_tokens == 0


def test_scopes_are_apart() -> None:
    engine = Harness()
    engine.finish(engine.send(words(0, 40), marks={0: "5m"}, keep=(0, 0.5), scope="a"))
    other = engine.send(words(0, 40), marks={0: "5m"}, keep=(0, 0.5), scope="b")
    engine.finish(other)
    assert (usage_of(other).cache_read_tokens, usage_of(other).automatic_tokens) == (0, 0)


def test_a_twin_waits_and_is_told_that_it_wrote() -> None:
    engine = Harness()
    twins = [
        engine.send(words(0, 48), words(100 * number, 3), marks={0: "5m"}, keep=(0, 0.5))
        for number in (1, 2)
    ]
    engine.finish(*twins)
    assert usage_of(twins[1]).computed_tokens == 4
    assert usage_of(twins[1]).cache_write_5m_tokens == 48


def test_choices_go_on_behind_what_is_kept() -> None:
    engine = Harness()
    sent = engine.send(words(0, 40), words(100, 3), marks={0: "5m"}, keep=(0, 0.5), choices=3)
    engine.finish(sent)
    assert usage_of(sent).computed_tokens == 44
    engine.check_idle()


def test_a_mark_in_front_holds_nothing() -> None:
    engine = Harness()
    marks: dict[int, Ttl] = {0: "1h", 1: "5m"}
    sent = engine.send(words(0, 8), words(50, 40), words(100, 5), marks=marks, keep=(1, 0.5))
    engine.finish(sent)
    assert sent.started is not None
    assert [(one.state, one.reason) for one in sent.started.breakpoints] == [
        ("none", "no_boundary"),
        ("leased", None),
    ]


def test_a_cancelled_turn_leaves_nothing_behind() -> None:
    engine = Harness(max_step_tokens=8)
    for num_steps in range(1, 12):
        sent = engine.send(words(1000 * num_steps, 40), marks={0: "5m"}, keep=(0, 0.5))
        engine.step(num_steps)
        engine.loop.cancel(sent.state.request_id)
        engine.step()
        assert engine.pool.counts().active == 0


def test_a_chunk_of_a_prompt_whose_file_is_lost_is_not_computed() -> None:
    pool, hasher = BlockPool(64, 4), ChainHasher(b"key", 4)
    store = StoreTier(64, 4, hasher, bytes.hex, lower_than=[pool])
    cache = PrefixCache(pool, Entries(pool, lease_share=0.5), hasher, store=store)
    clock = ManualClock()
    engine, document = Harness(cache=cache, clock=clock), words(0, 80)
    engine.finish(engine.send(document, marks={0: "5m"}))
    (entry,) = engine.entries.live()
    store.want(entry)
    for save in store.take_saves(64):
        store.written(save.key.name, is_good=True)
    stored = store.copy_of(entry)
    clock.advance(301)
    engine.finish(engine.send(words(500, 230), scope="other"))
    store.end(entry)
    # What is left lies behind a hole of three steps.
    for block in stored[:12]:
        store.forget(block)
    sent = engine.send(document, words(300, 3), marks={0: "5m"}, keep=(0, 0.5))
    engine.step()
    lost = list(sent.state.leader.table.arriving())
    assert len(lost) == 8
    for block in lost:
        store.forget(block)
    engine.finish(sent)
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
    while not all(sent.is_over for sent in sents):
        before = parts
        engine.step()
        assert parts <= before + 1
        if parts > before and any(one.started is None for one in sents[2:]):
            assert all(one.state.leader.copying is None for one in sents[:2])
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
    engine.finish(engine.send(words(0, 40), marks={0: "5m"}, keep=(0, 0.5)))
    assert seconds and max(seconds) == 0


def test_the_exact_beginning_is_computed_in_the_chunks_of_an_exact_prompt() -> None:
    def chunks(keep: tuple[int, float] | None) -> list[tuple[int, int]]:
        engine = Harness(max_step_tokens=32)
        marks: dict[int, Ttl] = {0: "1h", 1: "1h", 2: "5m"}
        texts = [words(0, 10), words(100, 30), words(200, 7)]
        engine.finish(engine.send(*texts, marks=marks, keep=keep))
        works = [work for step in engine.runner.steps for work in step if not work.cut]
        return [(work.start, len(work.token_ids)) for work in works if work.start < 40]

    assert chunks((1, 0.5)) == chunks(None)


def test_names_tell_tokens_of_the_whole_prompt() -> None:
    engine = Harness()
    sent = engine.send(
        words(0, 8),
        words(50, 32),
        words(100, 8),
        marks={1: "1h", 2: "5m"},
        keep=(1, 0.5),
        has_names=True,
    )
    engine.finish(sent)
    assert sent.started is not None
    assert sent.started.receipt.name_tokens == [8, 40, 48]
    held = [event for event in engine.events if isinstance(event, ChainHeld)]
    assert [name.tokens for event in held for name in event.names] == [40, 48]


@pytest.mark.parametrize("host_blocks", [0, 96])
def test_random_turns_of_both_kinds_answer_as_they_would_alone(host_blocks: int) -> None:
    read = [read_in_a_random_life(seed, host_blocks) for seed in range(60)]
    assert min(sum(exact for exact, _ in read), sum(kept for _, kept in read)) > 300


def read_in_a_random_life(seed: int, host_blocks: int) -> tuple[int, int]:
    """The tokens that were read by exact and by compressed turns."""
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
    for _ in range(25):
        segments = [rng.choice(texts[:3]), *(rng.choice(texts) for _ in range(rng.randint(0, 2)))]
        marked = rng.sample(range(len(segments)), rng.randint(0, len(segments)))
        keep = None
        if marked and rng.random() < 0.6:
            keep = (rng.choice(marked), rng.choice([0.25, 0.5]))
        sent.append(
            engine.send(
                *segments,
                marks={index: rng.choice(ENDS) for index in sorted(marked)},
                max_tokens=rng.choice([1, 4, 30]),
                choices=rng.choice([1, 1, 1, 3]),
                scope=rng.choice("ab"),
                seed=rng.randint(1, 9),
                service_class=rng.choice(["interactive", "interactive", "batch"]),
                keep=keep,
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
            read[one.state.query.compression is not None] += usage_of(one).cache_read_tokens
    return read[0], read[1]


@pytest.mark.parametrize("others", range(18, 28))
def test_what_is_held_of_a_prompt_need_not_be_its_beginning(others: int) -> None:
    """Of two copies either may have the blocks that are found; room is waited for all the same."""
    engine, prefix = Harness(max_step_tokens=40), words(0, 80)
    short = engine.send(words(0, 16), marks={0: "5m"}, keep=(0, 0.5))
    engine.finish(short, engine.send(prefix, marks={0: "1h"}))
    digests = engine.cache.digests("s", prefix)
    found = map(engine.pool.peek, digests.full)
    held = [block is not None and block.ref_count > 0 for block in found]
    assert held == [False] * 4 + [True] * 16
    long = occupied(engine, others, max_tokens=12)
    sent = engine.send(prefix, words(300, 3), marks={0: "5m"}, keep=(0, 0.5))
    engine.finish(long, sent)
    engine.check_idle()

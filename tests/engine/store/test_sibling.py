"""A sibling's entries in a shared store: read where they are asked for, told, and never else."""

from pathlib import Path
from typing import Any

import pytest

from engine.approximate.kinds import Sibling
from engine.approximate.placing import new_placings
from engine.approximate.request import ApproximateRequest, ApproximateSequence
from engine.protocol import FromSibling
from engine.store.files import fingerprint
from tests.engine.schedule.harness import Sent, words
from tests.engine.store.engines import OTHER, PREFIX, StoredEngine, read_of, started

SIBLING = Sibling(fingerprint({"weights": "theirs"}), 1, 3)
QUESTION = words(300, 5)


class Pair:
    """Engines of two models with one store; the second may read what the first one wrote."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.theirs = StoredEngine(path, is_shared=True, model="theirs")
        self.own = StoredEngine(path, is_shared=True, model="own", sibling=SIBLING, **options)

    def write(self, *prompts: list[int], **options: Any) -> None:
        known = self.num_known
        for prompt in prompts:
            self.theirs.say(prompt, **options)
        self.theirs.settle()
        self.own.step_until(lambda: self.num_known >= known + len(prompts))

    @property
    def num_known(self) -> int:
        return sum(entry.kind == SIBLING.kind for entry in self.own.entries.live())

    def ask(self, *segments: list[int], **options: Any) -> Sent:
        """A prompt whose first segment may be the sibling's."""
        marks: Any = {index: "5m" for index in range(len(segments) - 1)}
        turn = self.own.send(*segments, marks=marks, **{"sibling": 0} | options)
        self.own.finish(turn)
        return turn


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "store")


def reused(turn: Sent) -> int:
    report = started(turn).approximate
    assert isinstance(report, FromSibling)
    layers = (1, 3) if report.reused else (0, 0)
    assert (report.recomputed_layers, report.of_layers) == layers
    return report.reused


def test_what_a_sibling_wrote_is_read_to_the_token_and_told(pair: Pair) -> None:
    pair.write(PREFIX)
    first = pair.ask(PREFIX, QUESTION)
    usage = started(first).usage
    assert (usage.cache_read_tokens, usage.cache_write_5m_tokens) == (22, 0)
    assert (usage.input_tokens, usage.computed_tokens) == (6, 6)
    assert (reused(first), started(first).read_tier) == (22, "disk")
    assert started(first).miss_reason is None
    # What it wrote is of the kind, and read from its own blocks with what stands behind.
    next_text = words(400, 7)
    second = pair.ask(PREFIX, QUESTION, next_text, sibling=0)
    assert (read_of(second), reused(second), started(second).read_tier) == (22, 22, "device")
    assert started(second).usage.cache_write_5m_tokens == len(QUESTION)
    third = pair.ask(PREFIX, QUESTION, next_text)
    assert (read_of(third), reused(third)) == (22 + len(QUESTION), 22)
    kinds = [entry for entry in pair.own.entries.live() if entry.kind == SIBLING.kind_up_to(22)]
    assert {(entry.tokens, entry.is_leased) for entry in kinds} == {(22, True), (27, True)}
    (alone,) = (entry for entry in pair.own.entries.live() if entry.kind == SIBLING.kind)
    assert not alone.is_leased and alone.blocks[0].tier == "disk", "it is the sibling's to hold"
    pair.own.check_idle()


def test_exact_prompts_find_nothing_of_it_and_it_finds_what_is_exact(pair: Pair) -> None:
    pair.write(PREFIX)
    pair.ask(PREFIX, QUESTION)
    exact = pair.own.say(PREFIX, QUESTION)
    assert read_of(exact) == started(exact).usage.automatic_tokens == 0
    assert started(exact).approximate is None
    # Of equally long entries the exact one is read.
    asking = pair.ask(PREFIX, QUESTION, words(500, 3))
    assert (read_of(asking), reused(asking)) == (27, 0)
    # The sibling knows nothing of this model.
    assert not any(entry.kind for entry in pair.theirs.entries.live())


def test_without_a_siblings_entry_the_prompt_is_exact(pair: Pair) -> None:
    pair.write(OTHER)
    turn = pair.ask(PREFIX, QUESTION)
    assert (read_of(turn), reused(turn)) == (0, 0)
    assert started(turn).usage.cache_write_5m_tokens == 22
    assert read_of(pair.own.say(PREFIX, words(600, 2))) == 22


def test_only_what_the_sibling_computed_exactly_is_read(pair: Pair) -> None:
    half = pair.theirs.send(OTHER, marks={}, keep=(0, 0.5), scope="s")
    pair.theirs.finish(half)
    half = pair.theirs.send(OTHER, QUESTION, marks={1: "5m"}, keep=(0, 0.5), scope="s")
    pair.theirs.finish(half)
    pair.write(PREFIX, scope="s")
    assert pair.num_known == 1 < len(pair.theirs.entries.live())


def test_no_other_scope_reads_it(pair: Pair) -> None:
    pair.write(PREFIX, scope="s")
    pair.ask(PREFIX, QUESTION, scope="s")
    stranger = pair.ask(PREFIX, QUESTION, scope="other")
    assert (read_of(stranger), reused(stranger)) == (0, 0)
    assert started(stranger).usage.automatic_tokens == 0
    owner = StoredEngine(pair.own.path, is_shared=True, model="own")
    owner.settle()
    without = owner.send(PREFIX, QUESTION, marks={0: "5m"}, scope="s")
    owner.finish(without)
    assert read_of(without) == 0, "an engine without a sibling reads none"


def test_it_outlives_a_restart_in_its_kind(pair: Pair) -> None:
    pair.write(PREFIX)
    pair.ask(PREFIX, QUESTION)
    pair.own.settle()
    pair.theirs.end(is_killed=True)
    pair.own = pair.own.restart(is_killed=True)
    again = pair.ask(PREFIX, QUESTION)
    assert (read_of(again), reused(again), started(again).read_tier) == (22, 22, "disk")
    assert read_of(pair.own.say(PREFIX, QUESTION)) == 0


@pytest.mark.parametrize("kind", ["flip", "remove"])
def test_a_damaged_file_of_the_siblings_makes_the_prompt_exact(pair: Pair, kind: str) -> None:
    pair.write(PREFIX)
    assert pair.theirs.store is not None
    for place in pair.theirs.store.directory.path.glob("blocks/*/*"):
        data = place.read_bytes()
        place.unlink() if kind == "remove" else place.write_bytes(data[:-1] + b"!")
    turn = pair.ask(PREFIX, QUESTION)
    assert (read_of(turn), reused(turn)) == (0, 0)
    reason = "peer_checksum" if kind == "flip" else "peer_missing"
    assert pair.own.stats.misses[reason] >= 1
    assert read_of(pair.own.say(PREFIX, words(600, 2))) == 22
    pair.own.check_idle()


def test_a_pool_too_small_for_both_copies_computes_the_prompt(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "store", num_blocks=12)
    pair.write(PREFIX)
    turn = pair.ask(PREFIX, QUESTION)
    assert (read_of(turn), reused(turn)) == (0, 0)


def test_a_siblings_longer_entry_is_read_later(pair: Pair) -> None:
    """A conversation goes on at the sibling, and then here again."""
    pair.write(PREFIX)
    pair.ask(PREFIX, QUESTION)
    # What was computed here behind the shorter part is not what stands behind the longer one.
    longer = [*PREFIX, *QUESTION, *words(700, 13)]
    pair.write(longer)
    turn = pair.ask(longer, words(800, 5))
    assert (read_of(turn), reused(turn)) == (40, 40)
    assert started(turn).usage.cache_write_5m_tokens == 0
    pair.own.check_idle()


def test_what_is_gone_since_the_answer_began_is_computed_and_never_taken_for_the_siblings(
    pair: Pair,
) -> None:
    pair.write(PREFIX)
    state = pair.ask(PREFIX, QUESTION).state
    assert isinstance(state, ApproximateRequest)
    table = pair.own.cache.new_table(state.query)
    assert state.prompt.placed and list(table.gaps(22)) == [(0, 22)]
    assert new_placings(state.prompt, table, ()) == []


def test_it_is_preempted_and_goes_on_as_it_began(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "store", num_blocks=40)
    pair.write(PREFIX, OTHER)
    sents = [
        pair.own.send(prompt, QUESTION, marks={0: "5m"}, sibling=0, max_tokens=60, scope="s")
        for prompt in (PREFIX, OTHER, PREFIX)
    ]
    pair.own.finish(*sents)
    assert pair.own.scheduler.num_preempted > 0
    assert [reused(turn) for turn in sents] == [22, 30, 22]
    pair.own.check_idle()


def test_an_entry_in_front_of_the_siblings_end_has_not_what_the_sibling_wrote(pair: Pair) -> None:
    """Another document of the same length, which the sibling never saw."""
    document = words(1000, 16)
    second_document = words(2000, 16)
    pair.write([*PREFIX, *document])
    turn = pair.ask(PREFIX, document, QUESTION, sibling=1)
    assert (read_of(turn), reused(turn)) == (38, 38)
    unseen = pair.ask(PREFIX, second_document, QUESTION, sibling=1)
    assert (read_of(unseen), reused(unseen)) == (0, 0)
    assert started(unseen).usage.automatic_tokens == 0
    pair.own.check_idle()


def test_an_answer_whose_beginning_is_gone_goes_on_exact_and_needs_no_room_for_a_copy(
    pair: Pair, tmp_path: Path
) -> None:
    pair.write(PREFIX)
    begun = pair.ask(PREFIX, QUESTION).state.leader
    assert isinstance(begun, ApproximateSequence)
    query = begun.request.query
    begun.tokens = list(query.tokens)
    begun.table = pair.own.cache.new_table(query)
    begun.begin(pair.own.cache)
    assert begun.table.kind == SIBLING.kind_up_to(22) and not list(begun.table.gaps(22))
    begun.release()
    # Where nothing of it is in memory any more, there is just room for the prompt.
    empty = StoredEngine(tmp_path / "empty", model="own", num_blocks=8)
    begun.table = empty.cache.new_table(query)
    begun.begin(empty.cache)
    assert begun.table.kind is None and list(begun.table.gaps(22)) == [(0, 22)]


def test_a_prompt_below_one_block_is_exact(pair: Pair) -> None:
    pair.write(PREFIX)
    assert reused(pair.ask(words(1, 1), words(2, 1))) == 0

"""The waiting queue: who is next, what it is bounded by, who makes way."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.fair_queue import FairQueue, QueueFull, Waiting

TURNS = 8
TOKENS = 100
WORKSPACES = ("a", "b", "c", "d")

Turn = Waiting[int]


def anything(_: str | None) -> bool:
    return True


def turn(workspace: str, number: int = 0, tokens: int = 1, kind: str | None = None) -> Turn:
    return Waiting(workspace, kind, tokens, number)


def popped(queue: FairQueue[int]) -> list[Turn]:
    turns = []
    while (waiting := queue.pop(anything)) is not None:
        turns.append(waiting)
    return turns


def test_when_it_is_full_the_newest_of_who_has_most_make_way() -> None:
    queue: FairQueue[int] = FairQueue(TURNS, TOKENS)
    for number in range(4):
        queue.push(turn("flood", number))
    with pytest.raises(QueueFull, match="workspace_full"):
        queue.push(turn("flood", 4))
    for number in range(3):
        queue.push(turn("other", number))
    assert not queue.push(turn("single", 7))
    assert [victim.item for victim in queue.push(turn("single", 8))] == [3]
    assert len(queue) == TURNS
    # The three now have 3, 3 and 2: who would have as many as the others displaces nobody.
    with pytest.raises(QueueFull, match="queue_full"):
        queue.push(turn("single", 9))
    assert len(queue) == TURNS


def test_what_is_read_from_a_cache_is_given_back() -> None:
    """A workspace with long prompts that it reads waited for a hundred short ones of another's."""
    queue: FairQueue[int] = FairQueue()
    for number in range(100):
        queue.push(turn("crowd", number, 10))
    num_before = []
    for number in range(5):
        queue.push(turn("reader", number, 1000))
        num_before.append(0)
        while (taken := queue.pop(anything)) is not None and taken.workspace == "crowd":
            num_before[-1] += 1
        queue.give_back("reader", 990)
    assert max(num_before) <= 2, num_before


def test_nothing_is_given_back_for_the_time_before_a_queue() -> None:
    """The turn was let in before the queue was empty. Its workspace starts level with others."""
    queue: FairQueue[int] = FairQueue()
    queue.push(turn("reader", 0, 1000))
    assert len(popped(queue)) == 1
    for number in range(3):
        queue.push(turn("crowd", number, 10))
        queue.push(turn("reader", number, 10))
    queue.give_back("reader", 990)
    order = [waiting.workspace for waiting in popped(queue)]
    assert order == ["crowd", "reader"] * 3


@given(st.data())
def test_whatever_comes_its_bounds_hold_and_every_turn_leaves_once(data: st.DataObject) -> None:
    queue: FairQueue[int] = FairQueue(TURNS, TOKENS)
    inside: dict[int, Turn] = {}
    order: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for number in range(data.draw(st.integers(0, 60))):
        match data.draw(st.sampled_from(("push", "push", "pop", "leave"))):
            case "push":
                waiting = turn(
                    data.draw(st.sampled_from(WORKSPACES)),
                    number,
                    data.draw(st.integers(1, 70)),
                    data.draw(st.sampled_from((None, "x"))),
                )
                counts = Counter(waiting.workspace for waiting in inside.values())
                try:
                    victims = queue.push(waiting)
                except QueueFull:
                    assert len(queue) == len(inside), "a refusal changes nothing"
                    continue
                for victim in victims:
                    assert victim.workspace != waiting.workspace and counts[victim.workspace]
                    del inside[victim.item]
                    lane = order[victim.workspace, victim.kind]
                    assert lane.pop() == victim.item, "the newest"
                inside[number] = waiting
                order[waiting.workspace, waiting.kind].append(number)
            case "pop":
                kinds = data.draw(st.sets(st.sampled_from((None, "x"))))
                entry = queue.pop(kinds.__contains__)
                if entry is None:
                    assert not any(waiting.kind in kinds for waiting in inside.values())
                else:
                    assert order[entry.workspace, entry.kind].pop(0) == entry.item
                    assert entry.kind in kinds
                    del inside[entry.item]
            case "leave" if inside:
                waiting = inside.pop(data.draw(st.sampled_from(sorted(inside))))
                order[waiting.workspace, waiting.kind].remove(waiting.item)
                assert queue.remove(waiting) and not queue.remove(waiting)
        assert len(queue) == len(inside) <= TURNS
        assert queue.num_tokens == sum(waiting.tokens for waiting in inside.values()) <= TOKENS
        for workspace in WORKSPACES:
            mine = [waiting for waiting in inside.values() if waiting.workspace == workspace]
            assert len(mine) <= TURNS // 2
            assert len(mine) <= 1 or sum(o.tokens for o in mine) <= TOKENS // 2
    assert {waiting.item for waiting in popped(queue)} == set(inside)

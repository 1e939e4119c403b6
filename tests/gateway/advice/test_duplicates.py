"""Near-duplicate prefixes: what makes them one, and that the planner's simulator saves the same."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.protocol import Prompt, TextPart, Tool
from gateway.advice.duplicates import (
    Group,
    find_groups,
    near_duplicate,
    normalisations,
    renamed,
    simulated,
)
from gateway.advice.observation import Observation
from gateway.planner.plan import plan
from gateway.planning.traffic import EngineFacts, Job, Numbers, PlanRequest, Turn
from tests.gateway.advice.shapes import Author, Sent, at, single, turns_of, user

MIN_TOKENS = 64
Twin = Callable[[Author, Prompt], Prompt]


def with_text(prompt: Prompt, change: Callable[[str], str]) -> Prompt:
    return msgspec.structs.replace(prompt, system=[TextPart(change(prompt.system[0].text))])


def tools_turned(author: Author, prompt: Prompt) -> Prompt:
    return msgspec.structs.replace(prompt, tools=prompt.tools[::-1])


def keys_turned(author: Author, prompt: Prompt) -> Prompt:
    tools = [
        Tool(tool.name, dict(reversed(tool.input_schema.items())), tool.description)
        for tool in prompt.tools
    ]
    return msgspec.structs.replace(prompt, tools=tools)


TWINS: dict[str, tuple[str, Twin]] = {
    "tool_order": ("tools.0", tools_turned),
    "key_order": ("tools.0", keys_turned),
    "date": (
        "system.0",
        lambda _, p: with_text(p, lambda text: text.replace("27, 2026", "28, 2026")),
    ),
    "time": ("system.0", lambda _, p: with_text(p, lambda text: text.replace("T10:15", "T11:40"))),
    "nonce": ("system.0", lambda _, p: with_text(p, lambda text: text.replace("a81f", "77e0"))),
    "whitespace": (
        "system.0",
        lambda _, p: with_text(p, lambda text: text.replace("\n", " \n", 1)),
    ),
}
LEAD = "Today is Friday, November 27, 2026.\nSent 2026-11-27T10:15:04Z by req_a81f04c9.\n"


def traffic(author: Author, twin: Twin, marks: Any = None) -> tuple[list[Sent], Prompt, Prompt]:
    """Two prefixes in turns, six questions each, and one that has nothing of them."""
    prompt_a = single(author, author.tools(), LEAD + author.text(40))
    prompt_b = twin(author, prompt_a)
    stranger = single(author, author.tools(), author.text(40))
    requests = []
    for number in range(18):
        prompt = (prompt_a, prompt_b, stranger)[number % 3]
        request = msgspec.structs.replace(prompt, messages=[user(author.line())])
        marked = ((len(request.tools) + len(request.system) - 1, "5m"),) if marks is None else marks
        requests.append(Sent(at(number), request, marked))
    return requests, prompt_a, prompt_b


def planned(turns: list[Observation]) -> float:
    """The tokens that the planner's simulated engine with room for all reads."""
    numbers = Numbers()
    planner_turns = [
        Turn(
            at=turn.at_ms / 1000,
            scope=1,
            ids=[numbers.of(digest) for digest in turn.digests],
            ends=turn.tokens,
            segments=list(range(len(turn.digests))),
            marks=turn.marks,
            output=1,
            tail=turn.total - turn.tokens[-1],
        )
        for turn in turns
    ]
    engine = EngineFacts(engines=1, device_tokens=655_360, min_cache_tokens=MIN_TOKENS)
    answer = plan(
        Job(request=PlanRequest(), turns=planner_turns, engine=engine), lambda share: None
    )
    return answer.whole.hit_rate * answer.prompt_tokens


@pytest.mark.parametrize("kind", TWINS)
def test_a_near_duplicate_is_named_and_saves_what_the_planner_says(kind: str) -> None:
    path, twin = TWINS[kind]
    requests, first, second = traffic(Author(random.Random(kind)), twin)
    turns = turns_of(requests)
    (group,) = find_groups(turns, MIN_TOKENS)
    assert [turn.id for turn in group.turns] == [t.id for n, t in enumerate(turns) if n % 3 < 2]
    prompts = dict(zip(group.compared, map(msgspec.to_builtins, (first, second)), strict=True))
    advice = near_duplicate(group, MIN_TOKENS, prompts)
    assert advice is not None and (advice.kind, advice.path, advice.is_compared) == (
        kind,
        path,
        True,
    )
    as_one = [renamed(group, turn) if turn in group.turns else turn for turn in turns]
    assert planned(as_one) - planned(turns) == pytest.approx(advice.tokens, abs=0.5)
    # Eleven of twelve reads instead of ten.
    assert advice.tokens == group.turns[1].tokens[group.turns[1].prefix_at(group.first.head - 1)]
    before, after, _ = simulated(group, MIN_TOKENS)
    assert (before.hits, after.hits) == (10, 11)
    document = json.dumps(msgspec.to_builtins(advice))
    assert not any(
        line in document for text in prompts.values() for line in LEAD.split("\n") if line
    )


def changed_line(author: Author, prompt: Prompt) -> Prompt:
    return with_text(prompt, lambda text: text.replace("policy", "promise", 1))


def test_what_no_normalisation_makes_one_is_named_only_where_no_text_is_known() -> None:
    requests, first, second = traffic(Author(random.Random(7)), changed_line)
    (group,) = find_groups(turns_of(requests), MIN_TOKENS)
    unread = near_duplicate(group, MIN_TOKENS, {})
    assert unread is not None and unread.kind == "varying_text" and not unread.is_compared
    assert "nothing is kept" in unread.text
    prompts = dict(zip(group.compared, map(msgspec.to_builtins, (first, second)), strict=True))
    assert near_duplicate(group, MIN_TOKENS, prompts) is None


def test_unrelated_prefixes_with_the_same_tools_are_no_near_duplicates() -> None:
    author = Author(random.Random(8))
    tools = author.tools(6)
    requests = [Sent(at(n), single(author, tools, author.text(60))) for n in range(6)]
    assert find_groups(turns_of(requests), MIN_TOKENS) == []


def test_unmarked_turns_are_simulated_with_a_marker_behind_the_prefix() -> None:
    requests, _, _ = traffic(Author(random.Random(9)), TWINS["date"][1], marks=())
    (group,) = find_groups(turns_of(requests), MIN_TOKENS)
    advice = near_duplicate(group, MIN_TOKENS, {})
    assert advice is not None and "with a 5-minute marker" in advice.text and advice.tokens > 0


def test_what_is_new_in_every_request_is_told_by_digests_alone() -> None:
    author = Author(random.Random(10))
    text = author.text(40)
    requests = [Sent(at(n), single(author, [], f"id {n * 7919:08x}\n{text}")) for n in range(8)]
    group: Group
    (group,) = find_groups(turns_of(requests), MIN_TOKENS)
    advice = near_duplicate(replace(group), MIN_TOKENS, {})
    assert advice is not None and (advice.kind, advice.num_prefixes) == ("nonce", 8)


@pytest.mark.parametrize(
    "first, second, kinds",
    [
        ("It is 2026-11-27.", "It is 2026-01-02.", ["date"]),
        ("It is 27 Nov 2026, 9:05 AM.", "It is 3 May 2026, 11:55 PM.", ["date", "time"]),
        ("a  b\n", "a b", ["whitespace"]),
        ("key 0c9cf8a2-6f0d-4e8b-9d53-0d7f2f4a1b11", "key 1", None),
        (
            "call 123e4567-e89b-12d3-a456-426614174000",
            "call 923e4567-e89b-12d3-a456-426614174009",
            ["nonce"],
        ),
        ("The limit is 500.", "The limit is 900.", None),
        ("same", "same", []),
    ],
)
def test_the_fewest_normalisations_are_named(
    first: str, second: str, kinds: list[str] | None
) -> None:
    assert normalisations([first], [second]) == kinds

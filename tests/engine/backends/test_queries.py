"""From the wire to what the cache works with: offsets, names, limits."""

import pytest

from engine.backends.looped import new_samples, query_of
from engine.backends.prepare.preparer import new_segments, prepare
from engine.backends.synthetic_renderer import SyntheticRenderer
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.errors import PromptTooLong
from engine.protocol import (
    Description,
    GenerateRequest,
    Message,
    Name,
    Prompt,
    Sampling,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.rendered import SegmentSpan

BLOCK_SIZE = 4
PROMPT = Prompt(
    messages=[
        Message("user", [TextPart("q")]),
        Message("assistant", [ThinkingPart("t"), ToolUsePart("c", "f", {})]),
        Message("user", [ToolResultPart("c", "r")]),
    ],
    tools=[Tool("f", {})],
    system=[TextPart("s")],
)


def describe(granularity: int = 1, num_blocks: int = 64) -> Description:
    return Description(
        backend="synthetic",
        model="m",
        epoch="e",
        max_context_tokens=1000,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        granularity=granularity,
        min_cache_tokens=7,
        capabilities=[],
    )


def ask(text: str, *names: Name, **fields: object) -> GenerateRequest:
    prompt = Prompt(messages=[Message("user", [TextPart(text), TextPart("bbbb")])])
    request = {"request_id": "r", "scope": "s", "sampling": Sampling(max_tokens=1), **fields}
    return GenerateRequest(prompt=prompt, names=list(names), **request)  # type: ignore[arg-type]


def query(request: GenerateRequest, description: Description) -> CacheQuery:
    pool = BlockPool(8, BLOCK_SIZE)
    cache = PrefixCache(pool, Entries(pool, lease_share=0.5), ChainHasher(b"k", BLOCK_SIZE))
    rendered = SyntheticRenderer().render(request.prompt, thinking=False, scope=request.scope)
    prepared = prepare(request, rendered, description, request)
    return query_of(request, prepared, cache, description, arrived_at=5.0)


def test_segments_have_their_kinds_and_turns() -> None:
    spans = [SegmentSpan(10 * (i + 1)) for i in range(PROMPT.num_segments)]
    segments = new_segments(PROMPT, spans, 1)
    assert [(segment.kind, segment.turn) for segment in segments] == [
        ("tool", None),
        ("text", None),
        ("text", 0),
        ("thinking", 1),
        ("tool_use", 1),
        ("tool_result", 2),
    ]


def test_ends_are_floored_to_the_granularity_and_missing_ones_stay_missing() -> None:
    ends = [15, 16, 17, None, 31, 33]
    segments = new_segments(PROMPT, [SegmentSpan(end) for end in ends], 16)
    assert [segment.end for segment in segments] == [0, 16, 16, None, 16, 32]


@pytest.mark.parametrize(("asked", "minimum"), [(None, 7), (0, 1), (3, 3), (100, 100)])
def test_the_requests_minimum_goes_before_the_engines(asked: int | None, minimum: int) -> None:
    assert query(ask("aaaa", min_cache_tokens=asked), describe()).min_tokens == minimum


def test_names_go_to_token_offsets_and_never_backwards() -> None:
    names = (Name("a", 0, 9), Name("b", 0, 8), Name("c", 0), Name("d", 0, 1), Name("e", 1))
    held = query(ask("a" * 12, *names), describe()).names
    assert [(name.digest, name.tokens) for name in held] == [
        ("a", 2),
        ("b", 2),
        ("c", 3),
        ("d", 3),
        ("e", 4),
    ]


def test_a_prompt_leaves_room_for_its_answer_and_one_copy() -> None:
    longest = (16 - 2) * BLOCK_SIZE
    text = "a" * 4 * (longest - 5)
    assert len(query(ask(text), describe(num_blocks=16)).tokens) == longest
    with pytest.raises(PromptTooLong, match=f"{longest + 1} tokens > {longest} maximum"):
        query(ask(text + "a"), describe(num_blocks=16))


def test_a_prompt_leaves_room_in_the_context_for_one_token() -> None:
    with pytest.raises(PromptTooLong, match="1000 tokens > 999 maximum"):
        query(ask("a" * 4 * 995), describe(num_blocks=1000))


def test_choices_draw_differently_and_a_seed_makes_them_repeatable() -> None:
    def seeds(**fields: object) -> list[int]:
        request = ask("a", **fields)
        return [sample.seed for sample in new_samples(request, describe())]

    seeded = Sampling(max_tokens=1, num_choices=3, seed=7)
    assert seeds(sampling=seeded) == [7, 8, 9]
    free = Sampling(max_tokens=1, num_choices=2)
    assert seeds(sampling=free) == seeds(sampling=free)
    assert len({*seeds(sampling=free), *seeds(sampling=free, request_id="other")}) == 4

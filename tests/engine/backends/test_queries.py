"""From the wire to what the cache works with: offsets, names, limits."""

from dataclasses import fields
from typing import Any

import pytest

from engine.approximate.asking import Approximations, ExactRequest, asks_for_any
from engine.approximate.kinds import Sibling
from engine.approximate.prompt import ApproximatePrompt
from engine.backends.prepare.preparer import new_segments, prepare
from engine.backends.queries import new_samples, query_of
from engine.backends.synthetic_renderer import SyntheticRenderer
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.errors import InvalidRequest, PromptTooLong
from engine.protocol import (
    NEUTRAL,
    Breakpoint,
    Document,
    GenerateRequest,
    Message,
    Method,
    Name,
    Prompt,
    Sampling,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.protocol.reports import Technique
from engine.schedule.runner import SampleParams
from engine.text.rendered import SegmentSpan
from tests.engine.backends.local import description, request

BLOCK_SIZE = 4
METHODS: dict[Method, int | float] = {"keydiff": 0.1, "blocks": 4}
MEASURED: dict[str, Any] = {"kl": 0.0, "agreement": 1.0, "tokens": 256, "is_allowed": True}


def query(generate_request: GenerateRequest, num_blocks: int = 64) -> CacheQuery:
    described = description(
        max_context_tokens=1000,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        min_cache_tokens=7,
    )
    cache = new_cache(num_blocks)
    rendered = SyntheticRenderer().render(
        generate_request.prompt, thinking=False, scope=generate_request.scope
    )
    prepared = prepare(generate_request, rendered, described, generate_request)
    return query_of(generate_request, prepared, cache, described, lambda *_: None, arrived_at=5.0)


def new_cache(num_blocks: int) -> PrefixCache:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    entries = Entries(pool, lease_share=0.5)
    hasher = ChainHasher(b"k", BLOCK_SIZE)
    return PrefixCache(pool, entries, hasher)


def prompt_of(
    generate_request: GenerateRequest, num_blocks: int = 64, sibling: Sibling | None = None
) -> ApproximatePrompt:
    """The prompt of a request that asks for an approximate one."""
    assert asks_for_any(generate_request)
    rendered = SyntheticRenderer().render(
        generate_request.prompt, thinking=False, scope=generate_request.scope
    )
    prepared = prepare(
        generate_request, rendered, description(max_context_tokens=1000), generate_request
    )
    approximations = Approximations(
        sibling=sibling,
        techniques=[
            Technique(method=method, parameter=least, **MEASURED)
            for method, least in METHODS.items()
        ],
    )
    exact = query(generate_request, num_blocks)
    exact_request = ExactRequest(request=generate_request, query=exact, begins=prepared.begins)
    return approximations.prompt_of(exact_request, new_cache(num_blocks))


def ask(text: str, *names: Name, **fields: object) -> GenerateRequest:
    prompt = Prompt(messages=[Message("user", [TextPart(text), TextPart("bbbb")])])
    return request(prompt, names=list(names), **fields)


def test_segments_have_kinds_and_turns_and_ends_that_are_floored_to_the_granularity() -> None:
    prompt = Prompt(
        messages=[
            Message("user", [TextPart("q")]),
            Message("assistant", [ThinkingPart("t"), ToolUsePart("c", "f", {})]),
            Message("user", [ToolResultPart("c", "r")]),
        ],
        tools=[Tool("f", {})],
        system=[TextPart("s")],
    )
    spans = [SegmentSpan(end) for end in [15, 16, 17, None, 31, 33]]
    segments = [
        (segment.kind, segment.turn, segment.end) for segment in new_segments(prompt, spans, 16)
    ]
    assert segments == [
        ("tool", None, 0),
        ("text", None, 16),
        ("text", 0, 16),
        ("thinking", 1, None),
        ("tool_use", 1, 16),
        ("tool_result", 2, 32),
    ]


def test_a_prompt_leaves_room_for_its_answer_and_one_copy() -> None:
    longest = (16 - 2) * BLOCK_SIZE
    text = "a" * 4 * (longest - 5)
    assert len(query(ask(text), 16).tokens) == longest
    with pytest.raises(PromptTooLong, match=f"{longest + 1} tokens > {longest} maximum"):
        query(ask(text + "a"), 16)
    with pytest.raises(PromptTooLong, match="1000 tokens > 999 maximum"):
        query(ask("a" * 4 * 995), 1000)


def test_choices_draw_differently_and_a_seed_makes_them_repeatable() -> None:
    def seeds(request_id: str = "r", **sampling: int) -> list[int]:
        generate_request = ask(
            "a", request_id=request_id, sampling=Sampling(max_tokens=1, **sampling)
        )
        return [sample.seed for sample in new_samples(generate_request, description())]

    assert seeds(num_choices=3, seed=7) == [7, 8, 9]
    free = seeds(num_choices=2)
    assert free == seeds(num_choices=2)
    assert len({*free, *seeds("other", num_choices=2)}) == 4


def test_what_shapes_a_draw_is_a_field_of_requests_and_of_draws() -> None:
    draws = {field.name for field in fields(SampleParams)}
    assert NEUTRAL.keys() <= draws & {*Sampling.__struct_fields__}
    [neutral] = new_samples(ask("a", sampling=Sampling(max_tokens=1)), description())
    assert {name: getattr(neutral, name) for name in NEUTRAL} == NEUTRAL
    for name in NEUTRAL:
        sampling = Sampling(max_tokens=1, **{name: 0.5})
        [drawn] = new_samples(ask("a", sampling=sampling), description())
        assert getattr(drawn, name) == 0.5


def keeping(keep: float) -> dict[str, Any]:
    return {"breakpoints": [Breakpoint(0, "5m", keep=keep, scorer="keydiff")]}


def placing(**options: float) -> dict[str, Any]:
    return {"documents": [Document(0, **options)]}


@pytest.mark.parametrize(
    ("num_tokens", "fields", "num_blocks", "why"),
    [
        (3, keeping(0.5), 64, "breakpoints: keep: a marked prefix has 7 to"),
        (200, keeping(0.25), 128, "keep: 0.25 of 200 tokens must leave at least 64"),
        (100, keeping(0.99), 128, "keep: 0.99 of 100 tokens must leave at least 64, and fewer"),
        (200, keeping(0.5), 78, "breakpoints: keep: the prefix and the prompt take 79 blocks, and"),
        (60, placing(), 64, r"documents\[0\]: a block has at least 64 tokens, this one has"),
        (100, placing(recompute=200), 64, "at least 216 tokens"),
        # Fewer copied tokens could not tell one document from another.
        (70, placing(recompute=63), 64, "at least 79 tokens"),
        (100, placing(recompute=3), 64, "this engine does not place blocks"),
        (100, placing(recompute=0.1), 64, "this engine does not place blocks"),
        (200, placing(), 100, "take 10[0-9] blocks, and the engine has 100"),
    ],
)
def test_what_cannot_be_compressed_or_placed_is_refused(
    num_tokens: int, fields: dict[str, Any], num_blocks: int, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        prompt_of(ask("a" * 4 * num_tokens, **fields), num_blocks)
    assert prompt_of(ask("a" * 4 * 200, **keeping(0.5)), 128).compression is not None


def test_a_siblings_entries_are_asked_for_once_and_alone() -> None:
    asking = Breakpoint(0, "5m", sibling=True)
    sibling = Sibling(b"m" * 16, 1, 3)
    with pytest.raises(
        InvalidRequest, match="breakpoints: sibling: this engine does not read entries"
    ):
        prompt_of(ask("a", breakpoints=[asking]))
    half = Breakpoint(1, "5m", keep=0.5, scorer="keydiff")
    for wrong in (
        ask("a", breakpoints=[asking, Breakpoint(1, "5m", sibling=True)]),
        ask("a", breakpoints=[asking, half]),
        ask("a", breakpoints=[asking], documents=[Document(0)]),
        ask("a", breakpoints=[asking], adapter="ab"),
    ):
        with pytest.raises(InvalidRequest, match="breakpoints: sibling: only in one marker"):
            prompt_of(wrong, sibling=sibling)
    approximate = prompt_of(ask("a", breakpoints=[asking]), sibling=sibling)
    mark = approximate.sibling_mark
    assert mark is not None and not approximate.placed
    assert mark.exact.num_tokens == len(approximate.query.tokens), "it may be answered as it is"
    kinds = [sibling.kind, sibling.kind_up_to(5), sibling.kind_up_to(6), None]
    kinds += [Sibling(b"m" * 16, 2, 3).kind_up_to(5), Sibling(b"n" * 16, 1, 3).kind_up_to(5)]
    hasher = ChainHasher(b"k", BLOCK_SIZE)
    assert len({hasher.extend(hasher.root("s"), b"abcd", 0, kind) for kind in kinds}) == 6


def test_a_document_is_a_segments_text() -> None:
    generate_request = ask("a" * 4 * 200, documents=[Document(0, "1h", 20)])
    exact = query(ask("a" * 4 * 200), 256)
    prompt = prompt_of(generate_request, 256)
    cache_query = prompt.query
    (placed,) = prompt.placed
    assert (placed.copied - placed.start, placed.shift) == (20, placed.start - 1)
    assert cache_query.segments[0].end == placed.end
    assert placed.origin.tokens[1:-1] == exact.tokens[placed.start : placed.end]
    assert cache_query.tokens[: placed.copied] == exact.tokens[: placed.copied]
    assert cache_query.tokens[placed.end :] == exact.tokens[placed.end :]
    twice = ask("a" * 4 * 200, documents=[Document(0), Document(0)])
    with pytest.raises(InvalidRequest, match="two documents stand in one place"):
        prompt_of(twice, 256)

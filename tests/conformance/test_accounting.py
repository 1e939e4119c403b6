"""What a response says of its input: counted, read, written, and really reused."""

import pytest

from engine.protocol import (
    Done,
    Finished,
    Message,
    Name,
    Prompt,
    Started,
    TextPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from tests.conformance.engines import Engine, prompt


def test_started_comes_first_then_deltas_then_finished_then_done(engine: Engine) -> None:
    answer = engine.ask(prompt(engine.text(40)), engine.scope(), max_tokens=3)
    assert isinstance(answer.frames[0], Started)
    assert isinstance(answer.frames[-2], Finished) and isinstance(answer.frames[-1], Done)
    assert not any(isinstance(frame, Started | Finished | Done) for frame in answer.frames[1:-2])
    assert answer.started.epoch == engine.description.epoch
    assert answer.last.output_tokens == answer.finished[0].output_tokens <= 3


def test_the_four_classes_add_up_to_what_count_says(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(60), engine.text(40), system=(engine.text(50),))
    for marks in ([], [1], [(0, "1h"), 1], [(0, "1h"), (1, "1h"), 2]):
        usage = engine.ask(conversation, scope, *marks).usage
        assert usage.prompt_tokens == engine.count(conversation).input_tokens


def test_count_touches_no_cache(engine: Engine) -> None:
    before = engine.stats()
    engine.count(prompt(engine.text(200)))
    after = engine.stats()
    assert (after.blocks, after.counters) == (before.blocks, before.counters)


def test_a_first_request_writes_up_to_its_last_breakpoint(engine: Engine) -> None:
    conversation = prompt(engine.text(60), engine.text(40), engine.text(20))
    ends = engine.ends(conversation)
    usage = engine.ask(conversation, engine.scope(), (0, "1h"), 1).usage
    assert usage.cache_read_tokens == 0
    assert usage.cache_write_1h_tokens == ends[0]
    assert usage.cache_write_5m_tokens == ends[1] - ends[0]
    assert usage.computed_tokens == usage.prompt_tokens


def test_what_was_written_is_read_and_not_computed_again(engine: Engine) -> None:
    scope = engine.scope()
    shared = engine.text(100)
    first = prompt(shared, engine.text(30))
    second = prompt(shared, engine.text(50))
    engine.ask(first, scope, 0)
    usage = engine.ask(second, scope, 0).usage
    end = engine.ends(second)[0]
    assert usage.cache_read_tokens == end
    assert usage.computed_tokens == usage.prompt_tokens - end - usage.automatic_tokens
    assert usage.cache_write_5m_tokens == 0


def test_a_cached_prompt_gets_the_same_answer_as_a_cold_one(engine: Engine) -> None:
    shared = engine.text(120)
    question = engine.text(20)
    conversation = prompt(shared, question)
    cold = engine.ask(conversation, engine.scope(), 0, max_tokens=12)
    scope = engine.scope()
    engine.ask(prompt(shared, engine.text(30)), scope, 0, max_tokens=12)
    warm = engine.ask(conversation, scope, 0, max_tokens=12)
    assert warm.usage.cache_read_tokens > 0
    assert warm.text() == cold.text()


def test_a_longer_conversation_reads_the_shorter_one(engine: Engine) -> None:
    scope = engine.scope()
    parts = [engine.text(50) for _ in range(3)]
    for length in (1, 2, 3):
        conversation = prompt(*parts[:length])
        ends = engine.ends(conversation)
        usage = engine.ask(conversation, scope, length - 1).usage
        assert usage.cache_read_tokens == (ends[length - 2] if length > 1 else 0)
        assert usage.cache_write_5m_tokens == ends[length - 1] - usage.cache_read_tokens


def test_reuse_beyond_entries_is_told_and_not_billed_as_a_read(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    engine.ask(conversation, scope)
    usage = engine.ask(conversation, scope).usage
    assert usage.cache_read_tokens == 0
    assert usage.input_tokens == usage.prompt_tokens
    assert usage.computed_tokens == usage.prompt_tokens - usage.automatic_tokens


@pytest.mark.parametrize(("position", "is_found"), [(19, True), (20, False)])
def test_breakpoints_look_at_20_positions(engine: Engine, position: int, is_found: bool) -> None:
    scope = engine.scope()
    granularity = engine.description.granularity
    size = 12 if granularity == 1 else granularity + 12  # every part has a boundary of its own
    conversation = prompt(*(engine.text(size) for _ in range(25)))
    ends = engine.ends(conversation)
    if 0 in ends:
        pytest.skip("this template leaves no boundary between parts")
    engine.ask(conversation, scope, 0)
    started = engine.ask(conversation, scope, position).started
    assert started.usage.cache_read_tokens == (ends[0] if is_found else 0)
    assert started.miss_reason == (None if is_found else "lookback_exceeded")
    (report,) = started.breakpoints
    assert report.missed == ("grew" if is_found else "lookback_exceeded")


def test_each_breakpoint_says_why_what_stands_up_to_it_was_not_read(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(*(engine.text(80) for _ in range(3)))
    first = engine.ask(conversation, scope, 0, 1).started
    assert [report.missed for report in first.breakpoints] == ["cold", "cold"]
    assert first.miss_reason == "cold"
    grown = engine.ask(conversation, scope, 0, 1, 2).started
    assert [report.missed for report in grown.breakpoints] == [None, None, "grew"]
    assert grown.miss_reason is None
    engine.advance(301)
    expired = engine.ask(conversation, scope, 1, 2).started
    assert [report.missed for report in expired.breakpoints] == ["ttl_expired", "ttl_expired"]
    assert expired.miss_reason == "ttl_expired"


def test_a_run_of_tool_uses_or_results_is_one_position(engine: Engine) -> None:
    if not engine.has("tools"):
        pytest.skip("no tools")
    if not engine.has("own_template"):
        pytest.skip("declares no own_template: its server counts tools in its own way")
    calls = [ToolUsePart(f"c{i}", "look", {"at": engine.text(6)}) for i in range(25)]
    results = [ToolResultPart(f"c{i}", engine.text(6)) for i in range(25)]
    conversation = Prompt(
        messages=[
            Message("user", [TextPart(engine.text(60))]),
            Message("assistant", [*calls]),
            Message("user", [*results]),
        ],
        tools=[Tool("look", {"type": "object", "properties": {}})],
    )
    ends = engine.ends(conversation)
    if not (ends[1] and ends[-1]):
        pytest.skip("this template leaves no boundary here")
    scope = engine.scope()
    engine.ask(conversation, scope, 1)
    assert engine.ask(conversation, scope, 51).usage.cache_read_tokens == ends[1]


def test_a_prefix_below_the_minimum_is_neither_written_nor_read(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(50), engine.text(20))
    end = engine.ends(conversation)[0]
    there = engine.written_state
    for minimum, state, read_tokens in ((end + 1, "none", 0), (end, there, 0), (end, there, end)):
        started = engine.ask(conversation, scope, 0, minimum=minimum).started
        (report,) = started.breakpoints
        assert (report.state, started.usage.cache_read_tokens) == (state, read_tokens)
        if state == "none":
            assert report.reason == started.miss_reason == report.missed == "below_minimum"
            assert report.min_cache_tokens == minimum
            assert started.usage.input_tokens == started.usage.prompt_tokens


def test_the_engines_own_minimum_holds_where_the_request_says_nothing(engine: Engine) -> None:
    assert engine.description.min_cache_tokens == 32
    scope = engine.scope()
    conversation = prompt(engine.text(10), engine.text(60))
    below, above = engine.ends(conversation)
    reports = engine.ask(conversation, scope, 0, 1, minimum=None).started.breakpoints
    there = engine.written_state
    assert [r.state for r in reports] == ["none" if below < 32 else there, there]
    assert reports[1].tokens == above


def test_a_change_before_the_breakpoint_loses_the_cache_and_none_after(engine: Engine) -> None:
    scope = engine.scope()
    head = engine.text(60)
    tail = engine.text(40)
    engine.ask(prompt(head, tail), scope, 1)
    assert engine.ask(prompt(engine.text(60), tail), scope, 1).usage.cache_read_tokens == 0
    engine.ask(prompt(head, tail), scope, 0)
    conversation = prompt(head, engine.text(40))
    assert (
        engine.ask(conversation, scope, 0).usage.cache_read_tokens == engine.ends(conversation)[0]
    )


def test_markers_do_not_change_tokens(engine: Engine) -> None:
    conversation = prompt(engine.text(33), engine.text(34), engine.text(35))
    plain = engine.ask(conversation, engine.scope()).usage.prompt_tokens
    assert engine.ask(conversation, engine.scope(), 0, 1, 2).usage.prompt_tokens == plain


def test_scopes_read_nothing_of_each_other_and_their_own_does(engine: Engine) -> None:
    conversation = prompt(engine.text(100), engine.text(30))
    mine = engine.scope()
    yours = engine.scope()
    engine.ask(conversation, mine, 0)
    foreign = engine.ask(conversation, yours, 0)
    assert (foreign.usage.cache_read_tokens, foreign.usage.automatic_tokens) == (0, 0)
    assert foreign.started.miss_reason == "cold", "not a hint that another holds it"
    assert foreign.usage.computed_tokens == foreign.usage.prompt_tokens
    assert engine.ask(conversation, mine, 0).usage.cache_read_tokens == engine.ends(conversation)[0]
    assert [entry.scope for entry in engine.entries(mine)] == [mine]


def test_salts_keep_apart_what_one_scope_wrote(engine: Engine) -> None:
    if not engine.has("cache_salt"):
        pytest.skip("it keeps no scopes apart")
    scope = engine.scope()
    conversation = prompt(engine.text(100), engine.text(30))
    salts = ("", "a1" * 32, "b2" * 32)
    for salt in salts:
        cold = engine.ask(conversation, scope, 0, salt=salt)
        assert (cold.usage.cache_read_tokens, cold.usage.automatic_tokens) == (0, 0), salt
        assert cold.usage.computed_tokens == cold.usage.prompt_tokens
    for salt in salts:
        assert (
            engine.ask(conversation, scope, 0, salt=salt).usage.cache_read_tokens
            == (engine.ends(conversation)[0])
        )
    assert {entry.scope for entry in engine.entries(scope)} == {scope}, "one scope's budgets hold"


def test_max_tokens_zero_writes_the_prefix_and_generates_nothing(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(80), engine.text(10))
    warmed = engine.ask(conversation, scope, (0, "1h"), max_tokens=0)
    assert [type(frame).__name__ for frame in warmed.frames] == ["Started", "Finished", "Done"]
    assert warmed.usage.cache_write_1h_tokens == engine.ends(conversation)[0]
    assert warmed.finished[0].output_tokens == 0
    assert (
        engine.ask(conversation, scope, 0).usage.cache_read_tokens == engine.ends(conversation)[0]
    )


def test_choices_share_one_prompt_and_end_one_by_one(engine: Engine) -> None:
    if not engine.has("multiple_choices"):
        pytest.skip("one choice only")
    scope = engine.scope()
    for tokens in range(60, 60 + 2 * engine.description.block_size, 5):
        conversation = prompt(engine.text(tokens))
        for _ in range(2):
            answer = engine.ask(conversation, scope, num_choices=3, max_tokens=4)
            assert sorted(end.choice for end in answer.finished) == [0, 1, 2]
            assert answer.usage.prompt_tokens == engine.count(conversation).input_tokens
            assert answer.text(0) == answer.text(1) == answer.text(2), "greedy, from one prompt"


def test_a_stop_sequence_ends_the_answer_and_never_appears(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(40))
    whole = engine.ask(conversation, scope, max_tokens=30).text()
    assert len(whole) >= 6, "the engine said too little to cut"
    middle = len(whole) // 2
    for width in (1, 3, 5):
        stop = whole[middle : middle + width]
        answer = engine.ask(conversation, scope, max_tokens=30, stop_sequences=[stop])
        assert answer.text() == whole[: whole.index(stop)]
        assert (answer.finished[0].reason, answer.finished[0].stop_sequence) == (
            "stop_sequence",
            stop,
        )


def test_max_tokens_ends_the_answer_with_length(engine: Engine) -> None:
    answer = engine.ask(prompt(engine.text(40)), engine.scope(), max_tokens=2)
    assert (answer.finished[0].reason, answer.finished[0].output_tokens) == ("length", 2)


def test_a_receipt_says_which_names_are_held_and_leased(engine: Engine) -> None:
    engine.require("hold")
    scope = engine.scope()
    conversation = prompt(engine.text(80), engine.text(60))
    ends = engine.count(conversation).segment_tokens
    names = (Name(scope[:16], 0), Name(scope[16:], 1))
    receipt = engine.ask(conversation, scope, (0, "1h"), names=names).started.receipt
    assert receipt.name_tokens == ends
    assert (receipt.num_held, receipt.num_leased) == (2, 1)
    assert receipt.lease_seconds == 3600


def test_a_name_inside_a_segment_is_never_past_its_point(engine: Engine) -> None:
    scope = engine.scope()
    text = engine.text(100)
    conversation = prompt(text)
    end = engine.count(conversation).segment_tokens[0]
    points = (0, 10, len(text) // 2, len(text), len(text) + 99)
    names = tuple(Name(f"{point:016x}", 0, point) for point in points)
    tokens = engine.ask(conversation, scope, names=names).started.receipt.name_tokens
    assert tokens == sorted(tokens) and end is not None
    assert tokens[1] < tokens[2] < tokens[3] <= end and tokens[4] <= end


def test_a_wrong_name_never_gives_a_hit(engine: Engine) -> None:
    scope = engine.scope()
    name = Name("00000000deadbeef", 0)
    engine.ask(prompt(engine.text(80)), scope, 0, names=(name,))
    usage = engine.ask(prompt(engine.text(80)), scope, 0, names=(name,)).usage
    assert usage.cache_read_tokens == 0
    assert usage.automatic_tokens < engine.description.block_size, "the template's beginning"

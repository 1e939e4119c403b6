"""Requests from arrival to acknowledgement: races, cancellation, limits, restarts."""

import time
from contextlib import ExitStack

import msgspec
import pytest

from engine.protocol import MAX_RECORD_BYTES, Done, Failed, Finished, KeptRecord
from tests.conformance.conftest import new_engine
from tests.conformance.engines import Engine, Refused, prompt

# What is not cancelled decodes for 40 s; and what was, says so in its counts.
RELEASE_SECONDS = 60.0
LONG = 2000


def shares_while_running(engine: Engine) -> bool:
    """Whether what a running request computed is reused by others: not in llama.cpp's slots, and
    nobody knows of a server that speaks chat completions."""
    return engine.description.upstream in (None, "vllm")


def test_an_entry_is_not_readable_before_its_writer_started(slow_engine: Engine) -> None:
    engine = slow_engine
    scope = slow_engine.scope()
    shared = engine.text(700)
    conversation = prompt(shared, engine.text(10))
    with engine.stream(engine.request(conversation, scope, 0)) as first:
        wait_for_running(engine)
        with engine.stream(engine.request(conversation, scope, 0)) as second:
            assert first.start().usage.cache_write_5m_tokens > 0
            late = second.start()
            second.rest()
        first.rest()
    assert late.usage.cache_read_tokens == 0
    assert late.usage.cache_write_5m_tokens == engine.ends(conversation)[0]
    assert late.miss_reason == "in_progress_race"
    if shares_while_running(engine):
        assert late.usage.automatic_tokens > 0, "computed once all the same"
    assert engine.ask(conversation, scope, 0).usage.cache_read_tokens > 0


def test_an_entry_is_readable_from_started_on(slow_engine: Engine) -> None:
    engine = slow_engine
    scope = slow_engine.scope()
    if not shares_while_running(engine):
        pytest.skip("declares backend upstream: nobody else reads a busy slot of llama.cpp")
    conversation = prompt(engine.text(100), engine.text(10))
    with engine.stream(engine.request(conversation, scope, 0, max_tokens=1000)) as first:
        first.start()
        assert engine.ask(conversation, scope, 0).usage.cache_read_tokens > 0


def wait_for_running(engine: Engine, number: int = 1) -> None:
    since = time.monotonic()
    while engine.stats().running < number:
        assert time.monotonic() - since < 180, "it never ran"
        time.sleep(0.005)


def is_over(engine: Engine, request_id: str) -> bool:
    return request_id in engine.unacknowledged()


@pytest.mark.parametrize("way", ["call", "close"])
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_blocks_of_a_cancelled_request_are_free(slow_engine: Engine, way: str, moment: str) -> None:
    engine = slow_engine
    scope = slow_engine.scope()
    conversation = prompt(engine.text(LONG if moment == "prefill" else 100))
    request = engine.request(conversation, scope, 0, max_tokens=2000)
    with engine.stream(request) as stream:
        wait_for_running(engine)
        if moment == "decode":
            stream.start()
        since = time.monotonic()
        if way == "call":
            engine.cancel(request.request_id)
        else:
            stream.response.close()
        while engine.stats().blocks.active:
            assert time.monotonic() - since < RELEASE_SECONDS, "its blocks are not released"
            time.sleep(0.005)
    engine.wait_until_idle()
    final = engine.unacknowledged()[request.request_id]
    assert final.reason == "cancelled"
    if moment == "prefill":
        assert final.usage is None and engine.entries(scope) == []
    else:
        assert final.usage is not None and len(engine.entries(scope)) == 1
        assert engine.ask(conversation, scope, 0).usage.cache_read_tokens > 0


def test_a_cancelled_prefill_ends_its_stream_with_failed(slow_engine: Engine) -> None:
    engine = slow_engine
    request = engine.request(prompt(engine.text(LONG)), engine.scope(), 0)
    with engine.stream(request) as stream:
        wait_for_running(engine)
        assert engine.cancel(request.request_id)
        (failed,) = stream.rest().frames
    assert isinstance(failed, Failed) and failed.code == "cancelled"


def test_a_cancelled_answer_ends_its_stream_properly(slow_engine: Engine) -> None:
    engine = slow_engine
    request = engine.request(prompt(engine.text(40)), engine.scope(), max_tokens=2000)
    with engine.stream(request) as stream:
        stream.start()
        assert engine.cancel(request.request_id)
        *_, finished, last = stream.rest().frames
    assert isinstance(finished, Finished) and finished.reason == "cancelled"
    assert isinstance(last, Done)
    assert engine.unacknowledged()[request.request_id].output_tokens == last.output_tokens


def test_a_cancelled_waiting_request_writes_nothing(slow_engine: Engine) -> None:
    engine = slow_engine
    scope = slow_engine.scope()
    text = engine.text(60)
    with engine.stream(engine.request(prompt(engine.text(LONG)), engine.scope())) as first:
        wait_for_running(engine)
        request = engine.request(prompt(text), scope, 0)
        with engine.stream(request) as stream:
            assert engine.cancel(request.request_id)
            assert isinstance(stream.rest().frames[0], Failed)
        first.response.close()
    assert engine.entries(scope) == []


def test_cancelling_twice_or_something_unknown_is_no_error(slow_engine: Engine) -> None:
    engine = slow_engine
    request = engine.request(prompt(engine.text(LONG)), engine.scope())
    with engine.stream(request) as stream:
        wait_for_running(engine)
        assert engine.cancel(request.request_id)
        assert not engine.cancel(request.request_id)
        stream.rest()
    assert not engine.cancel("never heard of")


def test_a_request_id_is_refused_until_it_is_acknowledged(slow_engine: Engine) -> None:
    engine = slow_engine
    request = engine.request(prompt(engine.text(40)), engine.scope(), max_tokens=40)
    with engine.stream(request) as stream:
        stream.start()
        assert duplicate(engine, request.request_id)
        stream.rest()
    assert duplicate(engine, request.request_id)
    engine.acknowledge(request.request_id)
    engine.ask(prompt("again"), engine.scope(), request_id=request.request_id)


def duplicate(engine: Engine, request_id: str) -> bool:
    with pytest.raises(Refused) as refused:
        engine.ask(prompt("other"), engine.scope(), request_id=request_id)
    return (refused.value.status, refused.value.reply["code"]) == (409, "duplicate_request")


def test_a_refused_duplicate_leaves_the_running_one_alone(slow_engine: Engine) -> None:
    engine = slow_engine
    request = engine.request(prompt(engine.text(300)), engine.scope(), max_tokens=3)
    with engine.stream(request) as stream:
        assert duplicate(engine, request.request_id)
        stream.start()
        assert isinstance(stream.rest().last, Done)


def test_final_counts_are_what_the_stream_said_until_they_are_acknowledged(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(60), engine.text(20))
    request = engine.request(conversation, scope, (0, "1h"), max_tokens=5)
    with engine.stream(request) as stream:
        started = stream.start()
        answer = stream.rest()
    final = engine.unacknowledged()[request.request_id]
    assert final.usage == started.usage
    assert final.epoch == started.epoch == engine.description.epoch
    assert final.output_tokens == answer.last.output_tokens
    assert final.reason == answer.finished[0].reason
    for _ in range(2):
        engine.acknowledge(request.request_id, "never heard of")
        assert request.request_id not in engine.unacknowledged()


def test_the_totals_count_what_the_responses_said(engine: Engine) -> None:
    scope = engine.scope()
    shared = engine.text(50)
    before = engine.stats().counters
    usages = [
        engine.ask(prompt(shared, engine.text(20)), scope, (0, "1h"), 1).usage for _ in range(3)
    ]
    after = engine.stats().counters
    for name in (
        "input_tokens",
        "cache_read_tokens",
        "cache_write_5m_tokens",
        "cache_write_1h_tokens",
        "automatic_tokens",
        "computed_tokens",
    ):
        grown = getattr(after, name) - getattr(before, name)
        assert grown == sum(getattr(usage, name) for usage in usages), name
    assert after.requests - before.requests == 3


def test_beyond_the_waiting_bound_a_request_is_refused_at_once(slow_engine: Engine) -> None:
    engine = slow_engine
    scope = slow_engine.scope()
    with ExitStack() as streams:
        long = engine.request(prompt(engine.text(LONG)), scope)
        streams.enter_context(engine.stream(long))
        wait_for_running(engine)
        with pytest.raises(Refused) as refused:
            # Of one scope: those of others would take turns with the long one.
            for _ in range(6):
                request = engine.request(prompt(engine.text(40)), scope)
                streams.enter_context(engine.stream(request))
    assert (refused.value.status, refused.value.reply["code"]) == (529, "overloaded")
    assert engine.ask(prompt("after"), engine.scope()).last


def test_many_at_once_all_get_their_own_answer(engine: Engine) -> None:
    scope = engine.scope()
    shared = engine.text(80)
    engine.ask(prompt(shared), scope, 0)
    conversations = [prompt(shared, engine.text(10 + 7 * i)) for i in range(4)]
    alone = [
        engine.ask(conversation, engine.scope(), 0, max_tokens=8).text()
        for conversation in conversations
    ]
    with ExitStack() as stack:
        requests = [
            engine.request(conversation, scope, 0, max_tokens=8) for conversation in conversations
        ]
        streams = [stack.enter_context(engine.stream(request)) for request in requests]
        starts = [stream.start() for stream in streams]
        assert [stream.rest().text() for stream in streams] == alone
    reads = [start.usage.cache_read_tokens > 0 for start in starts]
    # The four that asked alone may have taken every slot of llama.cpp.
    assert all(reads) or not shares_while_running(engine)


def test_a_restart_is_a_new_epoch_and_holds_nothing(backend: str) -> None:
    epochs = []
    conversation = prompt("one two three four five six seven eight " * 10)
    for _ in range(2):
        with new_engine(backend, "fast") as engine:
            epochs.append(engine.description.epoch)
            assert engine.unacknowledged() == {} and engine.snapshot().chains == []
            answer = engine.ask(conversation, "s" * 32, 0)
            assert answer.usage.cache_read_tokens == 0
            assert engine.snapshot().epoch == answer.started.epoch == epochs[-1]
    assert epochs[0] != epochs[1]


def test_a_record_is_kept_as_long_as_its_requests_counts(engine: Engine) -> None:
    conversation = prompt(engine.text(20))
    scope = engine.scope()
    assert engine.description.keeps_records
    mine, bare = (engine.request(conversation, scope) for _ in range(2))
    mine = msgspec.structs.replace(mine, record='{"of": "ours, ü"}')
    for request in (mine, bare):
        with engine.stream(request) as stream:
            stream.rest()
    ids = [mine.request_id, bare.request_id, "unknown"]

    def kept() -> list[KeptRecord]:
        return engine.post("records", {"request_ids": ids}, list[KeptRecord])

    assert kept() == [KeptRecord(mine.request_id, mine.record)]
    assert mine.request_id in engine.unacknowledged()
    engine.acknowledge(*ids)
    assert kept() == []


def test_a_record_is_kept_also_of_a_request_that_never_started(slow_engine: Engine) -> None:
    engine = slow_engine
    request = engine.request(prompt(engine.text(LONG)), engine.scope(), 0)
    request = msgspec.structs.replace(request, record="ours")
    with engine.stream(request) as stream:
        wait_for_running(engine)
        assert engine.cancel(request.request_id)
        assert isinstance(stream.rest().frames[0], Failed)
    query = {"request_ids": [request.request_id]}
    engine.wait_until_idle()
    records = engine.post("records", query, list[KeptRecord])
    assert records == [KeptRecord(request.request_id, "ours")]


def test_a_record_that_is_too_long_is_refused_by_name(engine: Engine) -> None:
    request = engine.request(prompt(engine.text(20)), engine.scope())
    request = msgspec.structs.replace(request, record="ü" * (MAX_RECORD_BYTES // 2) + "x")
    with pytest.raises(Refused, match="record: at most 4096 bytes"), engine.stream(request):
        pass

"""An engine before a server of vLLM's shape: counts, isolation, what is sent, ends."""

import msgspec
import pytest

from engine.backends.upstream.server import UpstreamError, Wire
from engine.protocol import BreakpointReport, Done, Failed, ToolChoice
from tests.conformance.engines import Engine, Refused, prompt
from tests.engine.backends.upstream.conftest import engine_before, wait_until
from tests.engine.backends.upstream.scripted import (
    ANSWER,
    BLOCK_SIZE,
    Fault,
    Script,
    serving_script,
)


def test_the_description_says_what_is_kept_and_what_is_not(engine: Engine) -> None:
    description = engine.description
    assert (description.backend, description.upstream, description.granularity) == (
        "upstream",
        "vllm",
        BLOCK_SIZE,
    )
    guarantees = {guarantee.name: guarantee.is_kept for guarantee in description.guarantees}
    assert guarantees == {
        "exact_read": True,
        "exact_write": True,
        "hold": False,
        "isolation": True,
        "events": False,
        "forced_tools": False,
    }
    assert all(guarantee.note for guarantee in description.guarantees)


def test_a_prefix_is_written_and_then_read_as_far_as_the_server_reused_it(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    first = engine.ask(conversation, scope, 0)
    second = engine.ask(conversation, scope, 0)
    (end,) = engine.ends(conversation)
    assert first.usage.cache_write_5m_tokens == end == second.usage.cache_read_tokens
    assert second.usage.cache_write_5m_tokens == 0
    assert second.usage.computed_tokens == second.usage.prompt_tokens - end
    assert isinstance(second.last, Done)


def test_no_entry_is_ever_leased(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    for _ in range(2):
        (report,) = engine.ask(conversation, scope, (0, "1h")).started.breakpoints
        assert (report.state, report.reason, report.ttl) == ("best_effort", "no_hold", "1h")
        assert report.expires_in_seconds is None
    (entry,) = engine.entries(scope)
    assert (entry.state, entry.reason, entry.reads) == ("best_effort", "no_hold", 1)
    stats = engine.stats()
    assert (stats.num_leases, stats.blocks.leased) == (0, 0)
    assert not any(chain.num_leased for chain in engine.snapshot().chains)


@pytest.mark.parametrize("num_kept", [0, 2 * BLOCK_SIZE])
def test_what_the_server_evicted_is_not_read_but_written(
    engine: Engine, script: Script, num_kept: int
) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    engine.ask(conversation, scope, 0)
    script.cached = {(salt, tokens) for salt, tokens in script.cached if len(tokens) <= num_kept}
    (end,) = engine.ends(conversation)
    again = engine.ask(conversation, scope, 0)
    assert (again.usage.cache_read_tokens, again.usage.cache_write_5m_tokens) == (
        num_kept,
        end - num_kept,
    )
    assert again.started.miss_reason == "best_effort_evicted"
    assert engine.ask(conversation, scope, 0).usage.cache_read_tokens == end


def test_a_read_is_never_more_than_the_entry(engine: Engine) -> None:
    """The server reuses the whole prompt; only the marked prefix was bought."""
    scope = engine.scope()
    head = engine.text(60)
    tail = engine.text(60)
    engine.ask(prompt(head, tail), scope, 0)
    usage = engine.ask(prompt(head, tail), scope, 0).usage
    assert usage.cache_read_tokens == engine.ends(prompt(head, tail))[0]
    assert usage.automatic_tokens > 0


def test_no_scope_reads_another_scopes_prefix(engine: Engine, script: Script) -> None:
    conversation = prompt(engine.text(100))
    engine.ask(conversation, engine.scope(), 0)
    usage = engine.ask(conversation, engine.scope(), 0).usage
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 0)
    salts = {body["cache_salt"] for body in script.completions()[-4:]}
    assert len(salts) == 2, "each scope has a salt of its own"


def test_the_server_takes_the_salt_of_a_salted_prompt(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    for salt in ("", "a1" * 32, "b2" * 32):
        cold = engine.ask(conversation, scope, 0, salt=salt)
        assert (cold.usage.cache_read_tokens, cold.usage.automatic_tokens) == (0, 0), salt
        warm = engine.ask(conversation, scope, 0, salt=salt)
        assert [warm.usage.cache_read_tokens] == engine.ends(conversation), salt


def test_the_server_gets_token_ids_and_every_wish(engine: Engine, script: Script) -> None:
    conversation = prompt(engine.text(40))
    engine.ask(
        conversation,
        engine.scope(),
        max_tokens=3,
        top_p=0.5,
        top_k=7,
        seed=5,
        presence_penalty=0.25,
    )
    body = script.completions()[-1]
    assert len(body["prompt"]) == engine.count(conversation).input_tokens
    assert all(isinstance(token, int) for token in body["prompt"])
    wishes = {key: body[key] for key in ("max_tokens", "top_p", "top_k", "seed", "ignore_eos")}
    assert wishes == {"max_tokens": 3, "top_p": 0.5, "top_k": 7, "seed": 5, "ignore_eos": True}
    assert body["presence_penalty"] == 0.25


def test_prewarming_computes_and_tells_nothing(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    warmed = engine.ask(conversation, scope, 0, max_tokens=0)
    assert (warmed.text(), warmed.finished[0].output_tokens) == ("", 0)
    assert (
        engine.ask(conversation, scope, 0).usage.cache_read_tokens == engine.ends(conversation)[0]
    )


def test_choices_are_requests_of_their_own(engine: Engine) -> None:
    answer = engine.ask(prompt("Count."), engine.scope(), max_tokens=200, num_choices=3)
    assert [answer.text(choice) for choice in range(3)] == [ANSWER] * 3
    assert [finished.reason for finished in answer.finished] == ["stop"] * 3


def test_a_cancel_closes_the_connection_to_the_server(engine: Engine, script: Script) -> None:
    script.token_seconds = 0.2
    try:
        with engine.stream(
            engine.request(prompt("Count."), engine.scope(), max_tokens=50)
        ) as stream:
            stream.start()
            wait_until(lambda: script.open_streams == 1)
            assert engine.cancel(stream.request_id)
            assert stream.rest().finished[0].reason == "cancelled"
        wait_until(lambda: script.open_streams == 0)
        assert engine.unacknowledged()[stream.request_id].reason == "cancelled"
    finally:
        script.token_seconds = 0.0


def test_forced_calls_are_refused_where_the_server_takes_no_grammar(engine: Engine) -> None:
    assert not engine.has("forced_tools") and not engine.has("structured_output")
    forced = msgspec.structs.replace(
        engine.request(prompt("Paint."), engine.scope()), tool_choice=ToolChoice(mode="any")
    )
    with pytest.raises(Refused) as refused, engine.stream(forced):
        pass
    assert refused.value.reply["code"] == "unsupported"
    assert "forced_tools" in refused.value.reply["message"]


WRONG = {
    "no json": Fault(body=b"data: {nonsense\n\n", only_streams=True),
    "another form": Fault(body=b'data: {"choices": 3}\n\n', only_streams=True),
    "an error": Fault(body=b'data: {"error": {"message": "x"}}\n\n', only_streams=True),
    "a token that is none": Fault(
        body=b'data: {"choices": [{"token_ids": [99999999]}]}\n\n', only_streams=True
    ),
    "a negative token": Fault(body=b'data: {"choices": [{"token_ids": [-1]}]}\n\n'),
    "more tokens than asked": Fault(
        body=b'data: {"choices": [{"token_ids": [5, 5, 5, 5, 5, 5, 5, 5, 5]}]}\n\n',
        only_streams=True,
    ),
    "an end without a reason": Fault(after=1, only_streams=True),
    "an endless event": Fault(body=b"data: " + b"x" * (2**20 + 10), only_streams=True),
    "endless comments": Fault(body=b": x\n" * (2**18 + 10), only_streams=True),
    "another count of the prompt": Fault(usage={"prompt_tokens": 3}),
    "more reused than there is": Fault(usage={"prompt_tokens_details": {"cached_tokens": 10**6}}),
    "less reused than nothing": Fault(usage={"prompt_tokens_details": {"cached_tokens": -1}}),
    "a count that is none": Fault(usage={"prompt_tokens_details": {"cached_tokens": "many"}}),
    "no word of what was reused": Fault(usage={"prompt_tokens_details": None}),
    "an error before the stream": Fault(status=500),
    "no room": Fault(status=503),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_fails_the_request_and_counts_nothing_wrong(
    engine: Engine, script: Script, what: str
) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    script.fault = WRONG[what]
    answer = engine.ask(conversation, scope, 0, max_tokens=8)
    counts = engine.unacknowledged()
    final = list(counts.values())[-1]
    if isinstance(answer.last, Failed):
        assert answer.last.code == ("overloaded" if what == "no room" else "internal")
        assert (final.reason, final.usage, engine.entries(scope)) == ("failed", None, [])
    else:
        assert answer.finished[0].reason == final.reason == "failed"
        assert final.usage == answer.usage
        assert answer.usage.cache_read_tokens == 0
        assert final.output_tokens == answer.finished[0].output_tokens <= 8


@pytest.mark.parametrize(("reason", "code"), [("abort", "not_ready"), ("error", "internal")])
def test_an_answer_that_the_server_gives_up_fails_by_its_cause(
    engine: Engine, script: Script, reason: str, code: str
) -> None:
    script.fault = Fault(after=3, reason=reason, only_streams=True)
    scope = engine.scope()
    answer = engine.ask(prompt(engine.text(100)), scope, 0, max_tokens=50)
    (finished,) = answer.finished
    assert (finished.reason, finished.code, finished.output_tokens) == ("failed", code, 3)
    script.fault = None
    assert isinstance(engine.ask(prompt("Count."), scope).last, Done)


def test_a_slow_servers_comments_are_no_answer_and_no_error(engine: Engine, script: Script) -> None:
    script.fault = Fault(comments=30, only_streams=True)
    assert engine.ask(prompt("Count."), engine.scope(), max_tokens=200).text() == ANSWER


@pytest.mark.anyio
async def test_a_silent_server_fails_the_request_in_time() -> None:
    script = Script()
    script.fault = Fault(pause=30)
    with serving_script(script) as url:
        wire = Wire(url, "", silence_seconds=1.0)
        with pytest.raises(UpstreamError, match="said nothing in time"):
            await wire.ask("/v1/completions", dict[str, object], {"stream": False}, is_long=True)
        await wire.close()


def test_a_server_that_does_not_tell_gives_no_reads() -> None:
    script = Script(tells=False)
    with serving_script(script) as url, engine_before(url) as engine:
        guarantees = {guarantee.name: guarantee for guarantee in engine.description.guarantees}
        assert not guarantees["exact_read"].is_kept and not guarantees["isolation"].is_kept
        assert "not told" in guarantees["exact_read"].note
        assert "--enable-prompt-tokens-details" in guarantees["exact_read"].note
        scope = engine.scope()
        conversation = prompt(engine.text(100))
        engine.ask(conversation, scope, 0)
        again = engine.ask(conversation, scope, 0)
        assert again.usage.cache_read_tokens == again.usage.automatic_tokens == 0
        assert again.usage.cache_write_5m_tokens == engine.ends(conversation)[0]
        assert again.started.miss_reason == "not_told"
        report: BreakpointReport = again.started.breakpoints[0]
        assert (report.state, report.reason) == ("best_effort", "no_hold")
        bodies = script.completions()[-2:]
        assert all(body["stream"] for body in bodies), "no request only to be told"


def test_a_server_that_mixes_scopes_is_found_out_and_tells_nobody_of_others() -> None:
    script = Script(heeds_salts=False)
    with serving_script(script) as url, engine_before(url) as engine:
        isolation = next(g for g in engine.description.guarantees if g.name == "isolation")
        assert not isolation.is_kept and "reused" in isolation.note
        conversation = prompt(engine.text(100))
        engine.ask(conversation, engine.scope(), 0)
        usage = engine.ask(conversation, engine.scope(), 0).usage
        assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 0)

"""A server that dies, comes back, or was started anew: requests fail, counts stay, a new epoch."""

import msgspec
import pytest

from engine.protocol import Done, Failed, FinalCounts
from engine.protocol.reports import Description
from tests.conformance.engines import Engine, prompt
from tests.engine.backends.upstream.conftest import engine_before, wait_until
from tests.engine.backends.upstream.scripted import (
    CONTEXT,
    Fault,
    Script,
    ScriptedVllm,
    serving_script,
)
from tests.engine.backends.upstream.scripted_llamacpp import ScriptedLlamaCpp, SlotScript
from tests.engine.backends.upstream.scripted_openai import ScriptedOpenAi


def epoch_of(engine: Engine) -> str | None:
    """The epoch of now; None while the engine is not ready."""
    answer = engine.client.get("/v1/describe")
    if answer.status_code != 200:
        assert answer.json()["code"] == "not_ready", answer.text
        return None
    return msgspec.json.decode(answer.content, type=Description).epoch


def test_a_server_that_was_started_anew_begins_an_epoch_with_nothing_held() -> None:
    script = Script()
    with serving_script(script) as url, engine_before(url) as engine:
        scope = engine.scope()
        conversation = prompt(engine.text(100))
        before = epoch_of(engine)
        first = engine.ask(conversation, scope, 0)
        script.restart()
        wait_until(lambda: epoch_of(engine) not in (None, before))
        assert (engine.entries(scope), engine.snapshot().chains) == ([], [])
        again = engine.ask(conversation, scope, 0)
        assert again.usage.cache_read_tokens == 0
        assert again.usage.cache_write_5m_tokens == first.usage.cache_write_5m_tokens
        finals = engine.get("unacknowledged", list[FinalCounts])
        epochs = [counts.epoch for counts in finals if counts.scope == scope]
        assert epochs == [before, epoch_of(engine)], "final counts outlive the server"
        assert (
            engine.ask(conversation, scope, 0).usage.cache_read_tokens
            == engine.ends(conversation)[0]
        )


def test_while_the_server_is_away_the_engine_says_so_and_then_goes_on() -> None:
    script = Script(token_seconds=0.2)
    with serving_script(script) as url, engine_before(url) as engine:
        before = epoch_of(engine)
        with engine.stream(
            engine.request(prompt("Count."), engine.scope(), max_tokens=50)
        ) as stream:
            stream.start()
            script.is_down = True
            wait_until(lambda: epoch_of(engine) is None)
            # Readiness was told from the loop's third end on, and not while its trials ran.
            readiness = engine.client.get("/readyz")
            assert readiness.status_code == 503
            assert readiness.json()["stage"] == "waiting for the upstream server"
            assert engine.client.get("/metrics").status_code == 200
            answer = stream.rest()
            assert answer.finished[0].reason == "failed"
        refused = engine.client.post("/v1/generate", content=b"{}")
        assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
        wait_until(lambda: engine.client.get("/readyz").status_code == 503)
        script.is_down = False
        script.token_seconds = 0.0
        wait_until(lambda: epoch_of(engine) not in (None, before))
        assert engine.unacknowledged()[stream.request_id].reason == "failed"
        assert isinstance(engine.ask(prompt("Count."), engine.scope()).last, Done)
        wait_until(lambda: engine.client.get("/readyz").status_code == 200)


def test_a_connection_that_breaks_fails_its_request_alone() -> None:
    script = Script()
    with serving_script(script) as url, engine_before(url) as engine:
        before = epoch_of(engine)
        scope = engine.scope()
        conversation = prompt(engine.text(100))
        engine.ask(conversation, scope, 0)
        script.fault = Fault(after=3, only_streams=True)
        broken = engine.ask(conversation, scope, 0, max_tokens=50)
        assert broken.finished[0].reason == "failed"
        assert broken.finished[0].output_tokens == 3
        script.fault = Fault(after=0)
        assert isinstance(engine.ask(prompt("Count."), scope).last, Done | Failed)
        script.fault = None
        assert (
            engine.ask(conversation, scope, 0).usage.cache_read_tokens
            == engine.ends(conversation)[0]
        )
        assert epoch_of(engine) == before


@pytest.mark.parametrize(
    "change", [{"context": CONTEXT // 2}, {"tells": False}, {"model": "org/other"}]
)
def test_a_server_that_comes_back_as_another_ends_the_engine(change: dict[str, int | str]) -> None:
    """Whoever started the engine starts it again, and everything is asked anew."""
    script = Script()
    with serving_script(script) as url, engine_before(url) as engine:
        vars(script).update(change)
        script.restart()
        wait_until(lambda: engine.process.poll() is not None)
        assert engine.process.poll() == 1


@pytest.mark.parametrize("kind", [ScriptedOpenAi, ScriptedLlamaCpp])
def test_a_server_that_changes_its_model_without_a_sign_ends_the_engine(
    kind: type[ScriptedVllm],
) -> None:
    """Nothing but its own word for the model shows that it was started with another one."""
    script = SlotScript()
    with serving_script(script, kind) as url, engine_before(url, UPSTREAM_MODEL="demo") as engine:
        script.model = "org/other"
        wait_until(lambda: engine.process.poll() is not None)
        assert engine.process.poll() == 1

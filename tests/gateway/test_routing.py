"""Which engine a turn goes to."""

from dataclasses import dataclass, replace

import msgspec
import pytest

from engine.protocol import Capability, Description
from gateway.ask import Ask, Principal, TurnId
from gateway.catalogue import Model
from gateway.dialects.openai.ask import chat_ask_of
from gateway.errors import InvalidRequest
from gateway.routing import choose
from gateway.wire.openai.decode import decode_chat


@dataclass
class Candidate:
    url: str
    description: Description | None


def candidate(number: int, *capabilities: Capability) -> Candidate:
    description = Description(
        backend="synthetic",
        model="m",
        epoch="e",
        max_context_tokens=100,
        block_size=16,
        num_blocks=8,
        granularity=1,
        min_cache_tokens=16,
        capabilities=list(capabilities),
    )
    return Candidate(f"http://engine-{number}", description)


ENGINES = [candidate(number) for number in range(8)]


def ask(text: str, key: str | None = None, scope: str = "scope", n: int = 1) -> Ask:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "n": n}
    decoded = decode_chat(msgspec.json.encode({**body, "prompt_cache_key": key}))
    model = Model(id="m", display_name="m")
    return chat_ask_of(decoded, Principal("w", "k", scope), model, arrived=0.0)


def test_without_a_key_the_first_segment_decides() -> None:
    chosen = {choose(ask(f"prompt {i}"), ENGINES).url for i in range(64)}
    assert len(chosen) > 1
    assert len({choose(ask("one prompt"), ENGINES).url for _ in range(8)}) == 1


def test_one_key_prefers_one_engine_whatever_the_prompt() -> None:
    chosen = {choose(ask(f"prompt {i}", key="k"), ENGINES).url for i in range(64)}
    assert len(chosen) == 1
    [url] = chosen
    rest = [engine for engine in ENGINES if engine.url != url]
    assert len({choose(ask(f"prompt {i}", key="k"), rest).url for i in range(64)}) == 1


def test_a_key_means_nothing_beyond_its_workspace() -> None:
    chosen = {choose(ask("p", key="k", scope=f"scope {i}"), ENGINES).url for i in range(64)}
    assert len(chosen) > 1


def test_a_key_changes_neither_names_nor_scope() -> None:
    plain, keyed = ask("p"), ask("p", key="k")
    assert keyed.plan.names == plain.plan.names
    request = keyed.generate_request(TurnId("id"), 0.0, ())
    assert request.scope == "scope"


def test_more_than_one_choice_needs_the_capability() -> None:
    with pytest.raises(InvalidRequest, match=r"^n: "):
        choose(ask("p", n=2), ENGINES)
    assert choose(ask("p", n=2), [candidate(0, "multiple_choices")])


def test_thinking_is_asked_of_engines_that_can() -> None:
    thinks = replace(ask("p"), thinking=True)
    assert not thinks.count_request([]).thinking
    assert thinks.count_request(["thinking"]).thinking

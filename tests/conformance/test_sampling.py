"""Penalties, biases, tokens that end or may be drawn, and log-probabilities."""

import json
import math
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest

from engine.protocol import Done, DrawnToken, Prompt, Sampling, TextDelta
from tests.conformance.conftest import new_engine
from tests.conformance.engines import Answer, Engine, Refused
from tests.conformance.test_demands import answer, calls, demand, need
from tests.conformance.test_wishes import CALL, MODEL, STRICT, TOKENIZER, ask


def test_biases_and_penalties_move_what_is_drawn(engine: Engine) -> None:
    need(engine, "penalties")
    word = TOKENIZER.encode("a", add_special_tokens=False).ids[0]

    def text(**sampling: Any) -> str:
        request = demand(engine)
        changed = msgspec.structs.replace(
            request.sampling, max_tokens=40, temperature=0.0, ignore_eos=True, **sampling
        )
        return answer(engine, msgspec.structs.replace(request, sampling=changed)).text()

    assert text(logit_bias={word: 100.0}) == "a" * 40
    assert text(logit_bias={10**8: 100.0}) == text()
    fewer = text(logit_bias={word: 40.0}, frequency_penalty=2.0)
    assert fewer.startswith("a" * 3) and fewer != "a" * 40
    assert text(frequency_penalty=2.0) != text(frequency_penalty=-2.0)
    assert text(presence_penalty=2.0) == text(presence_penalty=2.0)


def tokens_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def num_output(reply: Answer) -> int:
    assert isinstance(reply.last, Done)
    return reply.last.output_tokens


def test_a_token_of_the_clients_ends_a_turn_and_none_does_too_early(engine: Engine) -> None:
    need(engine, "stop_token_ids")
    need(engine, "penalties")
    [word] = tokens_of("a")
    stop: dict[str, Any] = {"stop_token_ids": [word, 2**31 - 1], "logit_bias": {word: 100.0}}
    at_once = ask(engine, [], temperature=0.0, max_tokens=40, **stop)
    assert (at_once.text(), num_output(at_once)) == ("", 1)
    assert [end.reason for end in at_once.finished] == ["stop"]
    need(engine, "min_tokens")
    for ignore_eos in (False, True):
        later = ask(
            engine, [], temperature=0.0, max_tokens=40, min_tokens=5, ignore_eos=ignore_eos, **stop
        )
        assert num_output(later) == 6 and later.text()


def test_what_was_there_before_is_less_likely_under_a_repetition_penalty(engine: Engine) -> None:
    need(engine, "repetition_penalty")

    def text(**sampling: Any) -> str:
        return ask(engine, [], temperature=0.0, max_tokens=40, ignore_eos=True, **sampling).text()

    plain = tokens_of(text())
    varied = tokens_of(text(repetition_penalty=50.0))
    assert len(set(plain)) < len(plain)
    assert len(set(varied)) == len(varied), "no token comes twice"
    assert varied != plain and text(repetition_penalty=1.0) == text()


def test_a_model_is_drawn_from_as_its_makers_recommend_where_the_client_says_nothing(
    backend: str, tmp_path: Path
) -> None:
    """As in vLLM's own server. What the client says goes before it, neutral values too."""
    if backend == "synthetic":
        pytest.skip("declares backend synthetic: no model's files")
    model = tmp_path / "model"
    copytree(MODEL, model)
    config = {
        "temperature": 2.0,
        "top_k": 1,
        "min_p": 0.5,
        "repetition_penalty": 50.0,
        "top_p": None,
    }
    (model / "generation_config.json").write_text(json.dumps(config))
    with new_engine(backend, "fast", MODEL=str(model)) as engine:
        assert engine.description.default_sampling == Sampling(
            max_tokens=None, temperature=2.0, top_k=1, min_p=0.5, repetition_penalty=50.0
        )
        plain, neutral = (
            ask(engine, [], max_tokens=40, ignore_eos=True, **sampling).text()
            for sampling in ({"temperature": None}, {"repetition_penalty": 1.0})
        )
        [drawn, again] = [tokens_of(text) for text in (plain, neutral)]
        assert len(set(drawn)) == len(drawn) and len(set(again)) < len(again)


def test_the_likeliest_tokens_alone_are_left_by_a_high_min_p(engine: Engine) -> None:
    need(engine, "min_p")
    greedy = ask(engine, [], temperature=0.0, max_tokens=20).text()
    heated = ask(engine, [], temperature=2.0, seed=3, max_tokens=20)
    assert heated.text() != greedy
    assert ask(engine, [], temperature=2.0, seed=3, max_tokens=20, min_p=1.0).text() == greedy


def test_min_p_cuts_what_the_temperature_made_of_the_probabilities(engine: Engine) -> None:
    """A server that cuts first leaves the same tokens at every temperature.

    After this prompt the second token of our demo model has an eighth of the first one's
    probability, and ten more have a thirtieth or more. At temperature 2 the square roots count.
    """
    need(engine, "min_p")
    need(engine, "multiple_choices")
    need(engine, "own_template")
    if engine.description.model != MODEL.name:
        pytest.skip(f"declares model {engine.description.model}: its probabilities are not known")

    def first_tokens(temperature: float) -> set[str]:
        sampling = Sampling(
            max_tokens=1, temperature=temperature, min_p=0.18, seed=3, num_choices=8
        )
        request = engine.request(Prompt([], text="def "), engine.scope())
        reply = answer(engine, msgspec.structs.replace(request, sampling=sampling))
        return {reply.text(choice) for choice in range(8)}

    cool = first_tokens(1.0)
    assert len(cool) == 1
    assert cool < first_tokens(2.0)


def test_no_other_tokens_are_drawn_than_those_that_are_allowed(engine: Engine) -> None:
    need(engine, "allowed_token_ids")
    words = {*tokens_of("a"), *tokens_of("b")}
    allowed: dict[str, Any] = {"allowed_token_ids": [*words, 2**31 - 1], "temperature": 2.0}
    reply = ask(engine, [], seed=3, max_tokens=20, **allowed)
    assert set(reply.text()) == {"a", "b"} and num_output(reply) == 20
    assert [end.reason for end in reply.finished] == ["length"], "no end is among them"
    for tools, ids in (([], [2**31 - 1]), ([STRICT], [*words])):
        with pytest.raises(Refused, match="allowed_token_ids"):
            ask(engine, tools, allowed_token_ids=ids)


def drawn_tokens(reply: Answer) -> list[DrawnToken]:
    return [
        token for frame in reply.frames if isinstance(frame, TextDelta) for token in frame.logprobs
    ]


def test_each_token_of_a_text_has_its_probability_and_the_likeliest_others(engine: Engine) -> None:
    need(engine, "logprobs")
    plain = ask(engine, [], temperature=0.0, max_tokens=12)
    reply = ask(engine, [], temperature=0.0, max_tokens=12, logprobs=5)
    assert drawn_tokens(plain) == []
    drawn = drawn_tokens(reply)
    assert b"".join(token.drawn.token for token in drawn).decode().strip() == reply.text().strip()
    assert reply.text() == plain.text()
    for token in drawn:
        logprobs = [likely.logprob for likely in token.top]
        assert len(logprobs) == 5 and logprobs == sorted(logprobs, reverse=True)
        assert token.top[0] == token.drawn, "greedy"
        assert sum(map(math.exp, logprobs)) <= 1 + 1e-4


def test_probabilities_are_the_models_own_whatever_biases_make_of_them(engine: Engine) -> None:
    need(engine, "logprobs")
    need(engine, "penalties")
    free = drawn_tokens(ask(engine, [], temperature=0.0, max_tokens=1, logprobs=2))
    first, second = free[0].top
    bias = {first.token_id: -100.0}
    [biased] = drawn_tokens(
        ask(engine, [], temperature=0.0, max_tokens=1, logprobs=0, logit_bias=bias)
    )
    assert (biased.drawn.token_id, biased.top) == (second.token_id, [])
    assert biased.drawn.logprob == pytest.approx(second.logprob, abs=1e-3)


def test_a_call_has_no_probabilities(engine: Engine) -> None:
    need(engine, "logprobs")
    need(engine, "strict_tools")
    reply = ask(engine, [STRICT], temperature=0.0, logit_bias={CALL: 100.0}, logprobs=1)
    assert len(calls(reply)) == 1
    assert b"tool_call" not in b"".join(token.drawn.token for token in drawn_tokens(reply))

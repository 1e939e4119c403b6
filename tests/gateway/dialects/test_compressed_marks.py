"""Markers that ask for a part of a prefix: who may, where, and what the prefixes are called."""

from dataclasses import replace
from typing import Any

import pytest
from anthropic import BadRequestError

from engine.protocol.reports import Description, Technique
from gateway.base.errors import InvalidRequest
from gateway.prompt.ask import Ask
from gateway.routing.router import check_capabilities
from tests.gateway.bodies import ASKED, body, lowered, lowered_chat, said, text
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MODEL

ALLOWED = replace(ASKED, principal=replace(ASKED.principal, may_approximate=True))
HALF = {"type": "ephemeral", "holdfast": {"keep": 0.5}}
PLAIN = {"type": "ephemeral"}


def asked(first: Any, second: Any = None, **more: Any) -> Ask:
    blocks = [text("A document. " * 300, first), text("A question.", second)]
    return lowered(body(messages=[said(*blocks)], **more), ALLOWED)


def names(ask: Ask) -> list[str]:
    return [name.digest for name in ask.plan.names]


def test_the_breakpoint_and_what_follows_it_are_of_the_kind() -> None:
    exact, half = asked(PLAIN, PLAIN), asked(HALF, PLAIN)
    assert [point.keep for point in half.plan.breakpoints] == [0.5, None]
    assert [point.ttl for point in half.plan.breakpoints] == ["5m", "5m"]
    # From the end of the marked segment on prefixes have other names, and no others go out.
    assert half.plan.names[0].characters is None and half.plan.names[0].segment == 0
    assert not set(names(exact)) & set(names(half))
    inside = [p.name for p in exact.plan.prefixes if p.name.characters is not None]
    assert inside and inside == [p.name for p in half.plan.prefixes if p.name.characters]
    for other in ({"keep": 0.25}, {"keep": 0.5, "scorer": "random"}):
        assert not set(names(half)) & set(names(asked({**HALF, "holdfast": other}, PLAIN)))


def test_what_is_not_allowed_is_refused_by_its_field() -> None:
    refusals = [
        (lambda: lowered(body(messages=[said(text("x", HALF))])), "this workspace may not"),
        (
            lambda: asked(HALF, HALF),
            r"messages\.0\.content\.1\.cache_control\.holdfast: one marker",
        ),
        (lambda: asked(None, cache_control=HALF), "cache_control.holdfast: must be in a block"),
        (lambda: asked({**PLAIN, "holdfast": {"keep": 1}}), "holdfast.keep: Input should be less"),
        (lambda: asked({**PLAIN, "holdfast": {"keep": 0.01}}), "holdfast.keep: Input should be"),
        (lambda: asked({**PLAIN, "holdfast": {"block": "anywhere"}}), "holdfast"),
        (lambda: asked({**PLAIN, "holdfast": {"keep": 0.5, "scorer": "best"}}), "scorer"),
    ]
    for ask, message in refusals:
        with pytest.raises(InvalidRequest, match=message):
            ask()


def test_chat_marks_alike() -> None:
    part = {"type": "text", "text": "A document. " * 300, "cache_control": HALF}
    request = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    assert [p.keep for p in lowered_chat(request, ALLOWED).plan.breakpoints][:1] == [0.5]
    with pytest.raises(InvalidRequest, match="this workspace may not"):
        lowered_chat(request)


def test_a_marker_that_asks_is_never_left_out_without_a_word() -> None:
    part = {"type": "text", "text": "A document. " * 300, "cache_control": PLAIN}
    message = {"role": "user", "content": [part], "cache_control": HALF}
    with pytest.raises(InvalidRequest, match="two markers in one place"):
        lowered_chat({"model": "m", "messages": [message]}, ALLOWED)


def test_the_header_of_answers_asks_for_nothing(stack: Stack) -> None:
    with pytest.raises(BadRequestError, match="holdfast-approximate: answers have it"):
        stack.sdk().messages.create(
            model=MODEL,
            max_tokens=5,
            messages=[{"role": "user", "content": "q"}],
            extra_headers={"holdfast-approximate": "keep=0.5"},
        )


def test_an_engine_refuses_what_it_did_not_measure_or_found_too_far_from_exact() -> None:
    description = Description(
        backend="native",
        model="m",
        epoch="e",
        max_context_tokens=4096,
        block_size=16,
        num_blocks=64,
        granularity=1,
        min_cache_tokens=1,
        capabilities=[],
    )
    path = r"messages\.0\.content\.0\.cache_control\.holdfast\.keep: "
    with pytest.raises(InvalidRequest, match=path + "this engine does not compress"):
        check_capabilities(asked(HALF), description)
    far = Technique(scorer="kvzip", keep=0.5, kl=3.0, agreement=0.1, tokens=9, is_allowed=False)
    near = Technique(scorer="kvzip", keep=0.75, kl=0.1, agreement=0.9, tokens=9, is_allowed=True)
    measured = Description(**{**_fields(description), "techniques": [far, near]})
    with pytest.raises(InvalidRequest, match=path + r"kvzip at 0\.5 .* KL 3\.00"):
        check_capabilities(asked(HALF), measured)
    check_capabilities(asked({**PLAIN, "holdfast": {"keep": 0.8}}), measured)
    check_capabilities(asked(PLAIN), description)


def _fields(description: Description) -> dict[str, Any]:
    return {name: getattr(description, name) for name in description.__struct_fields__}

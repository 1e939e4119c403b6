"""Markers that ask for a part of a prefix: who may, where, and what the prefixes are called."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from msgspec import structs

from engine.protocol import Document
from engine.protocol.reports import Description, Technique
from gateway.base.errors import InvalidRequest, StillMeasuring
from gateway.base.grants import AutoCache
from gateway.prompt.ask import Ask
from gateway.prompt.wish import ApproximateMark
from gateway.routing.router import check_capabilities, kind_of
from tests.gateway.bodies import ASKED, body, lowered, lowered_chat, said, text
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MESSAGES, MODEL
from tests.gateway.serving import API_KEY

ALLOWED = replace(ASKED, principal=replace(ASKED.principal, may_approximate=True))
HALF = {"type": "ephemeral", "holdfast": {"keep": 0.5}}
PLAIN = {"type": "ephemeral"}
SIBLING = {"type": "ephemeral", "holdfast": {"sibling": True}}
BLOCK: dict[str, Any] = {"type": "ephemeral", "holdfast": {"block": "anywhere"}}


def ask_of(first: Any, *marks: Any, **more: Any) -> Ask:
    blocks = [text("A document. " * 300, first)]
    blocks += [text("A question.", mark) for mark in marks or [None]]
    return lowered(body(messages=[said(*blocks)], **more), ALLOWED)


def header(ask: Ask) -> str | None:
    return None if ask.plan.approximate is None else ask.plan.approximate.header


def unnamed(ask: Ask) -> list[Document]:
    """The documents without their names, which all have one."""
    assert ask.plan.approximate is not None
    documents = ask.plan.approximate.documents
    assert all(document.name for document in documents)
    return [structs.replace(document, name="") for document in documents]


def names(ask: Ask) -> list[str]:
    return [name.digest for name in ask.plan.names]


def test_the_breakpoint_and_what_follows_it_are_of_the_kind() -> None:
    exact = ask_of(PLAIN, PLAIN)
    half = ask_of(HALF, PLAIN)
    assert [point.keep for point in half.plan.breakpoints] == [0.5, None]
    assert [point.ttl for point in half.plan.breakpoints] == ["5m", "5m"]
    # From the end of the marked segment on prefixes have other names, and no others go out.
    assert half.plan.names[0].characters is None and half.plan.names[0].segment == 0
    assert not set(names(exact)) & set(names(half))
    inside = [p.name for p in exact.plan.prefixes if p.name.characters is not None]
    assert inside and inside == [p.name for p in half.plan.prefixes if p.name.characters]
    for options in ({"keep": 0.25}, {"keep": 0.5, "scorer": "random"}):
        assert not set(names(half)) & set(names(ask_of({**HALF, "holdfast": options}, PLAIN)))


def test_a_block_that_stands_anywhere_is_no_breakpoint() -> None:
    exact = ask_of(PLAIN, PLAIN)
    ask = ask_of(BLOCK, {**BLOCK, "ttl": "1h"}, *[PLAIN] * 4)
    assert [point.segment for point in ask.plan.breakpoints] == [2, 3, 4, 5]
    assert unnamed(ask) == [Document(0), Document(1, "1h")]
    assert header(ask) == "blocks; recompute=16"
    # All that is behind its beginning has another name.
    assert not set(names(exact)) & set(names(ask))
    four = {"type": "ephemeral", "holdfast": {"block": "anywhere", "recompute": 4}}
    assert unnamed(ask_of(four)) == [Document(0, recompute=4)]
    assert not set(names(ask_of(four))) & set(names(ask_of(BLOCK)))
    message = "documents[1]: a block has at least 64 tokens"
    path = "messages.0.content.1.cache_control.holdfast.block"
    assert ask.plan.in_request(message) == path + message.removeprefix("documents[1]")


def test_a_siblings_prefixes_have_other_names_from_the_start_on() -> None:
    exact = ask_of(PLAIN, PLAIN)
    ask = ask_of(SIBLING, PLAIN)
    assert [point.sibling for point in ask.plan.breakpoints] == [True, False]
    assert len(names(ask)) == len(names(exact)) and not set(names(exact)) & set(names(ask))
    assert header(ask) == "sibling=true"
    path = "messages.0.content.0.cache_control.holdfast.sibling"
    assert ask.plan.in_request("breakpoints: sibling: no") == f"{path}: no"
    headed = replace(ALLOWED, header_mark=ApproximateMark(None, sibling=True))
    plain = body(messages=[said(text("A document. " * 300, PLAIN), text("A question.", PLAIN))])
    assert names(lowered(plain, headed)) == names(ask)


def test_what_is_not_allowed_is_refused_by_its_field() -> None:
    refusals = [
        (lambda: lowered(body(messages=[said(text("x", HALF))])), "this workspace may not"),
        (
            lambda: ask_of(HALF, HALF),
            r"messages\.0\.content\.1\.cache_control\.holdfast: one marker",
        ),
        (lambda: ask_of(None, cache_control=HALF), "cache_control.holdfast: must be in a block"),
        (lambda: ask_of({**PLAIN, "holdfast": {"keep": 1}}), "holdfast.keep: Input should be less"),
        (lambda: ask_of({**PLAIN, "holdfast": {"keep": 0.01}}), "holdfast.keep: Input should be"),
        (lambda: ask_of({**PLAIN, "holdfast": {}}), "must have one of `keep`, `block` and"),
        (lambda: ask_of({**PLAIN, "holdfast": {"keep": 0.5, "sibling": True}}), "must have one of"),
        (lambda: ask_of({**PLAIN, "holdfast": {"sibling": True, "scorer": "h2o"}}), "`scorer` is"),
        (lambda: ask_of(SIBLING, BLOCK), r"content\.1\.cache_control\.holdfast\.block: not beside"),
        (lambda: ask_of({**PLAIN, "holdfast": {"block": "here"}}), "holdfast.block"),
        (lambda: ask_of({**BLOCK, "holdfast": {**BLOCK["holdfast"], "scorer": "h2o"}}), "scorer"),
        (lambda: ask_of({**HALF, "holdfast": {"keep": 0.5, "recompute": 4}}), "recompute"),
        (lambda: ask_of(HALF, BLOCK), r"content\.1\.cache_control\.holdfast\.block: not beside"),
        (lambda: ask_of(*[BLOCK] * 65), r"content\.64\..*block: at most 64 of a request"),
        (lambda: ask_of({**PLAIN, "holdfast": {"keep": 0.5, "scorer": "best"}}), "scorer"),
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


HEADED = replace(ALLOWED, header_mark=ApproximateMark(0.5, "kvzip"))


def kept_at(ask: Ask) -> dict[int, float | None]:
    return {point.segment: point.keep for point in ask.plan.breakpoints}


def test_the_header_is_for_the_last_marker_that_stays_where_it_is() -> None:
    system = [text("One. " * 300, PLAIN), text("Two. " * 300, PLAIN), text("Three.")]
    grown = lowered(body(system=system, messages=[said(text("q", PLAIN))]), HEADED)
    assert kept_at(grown) == {0: None, 1: 0.5, 3: None}
    marked = {**body(messages=[said(text("A document. " * 300, HALF), text("q", PLAIN))])}
    plain = {**body(messages=[said(text("A document. " * 300, PLAIN), text("q", PLAIN))])}
    # The same entry as the marker's extension asks for.
    assert names(lowered(plain, HEADED)) == names(lowered(marked, ALLOWED))
    assert lowered(plain, HEADED).plan.in_request("breakpoints: keep: too short") == (
        "holdfast-approximate: too short"
    )
    chat = {"model": "m", "messages": [{"role": "system", "content": "x"}, *MESSAGES]}
    client = replace(HEADED, principal=replace(HEADED.principal, auto_cache=AutoCache()))
    assert kept_at(lowered_chat(chat, client)) == {0: 0.5, 1: None}
    with pytest.raises(InvalidRequest, match=r"approximate: nothing .* is marked"):
        lowered(body(), HEADED)
    with pytest.raises(InvalidRequest, match="holdfast-approximate: a marker of the request says"):
        lowered(marked, HEADED)


def asked_of_all(stack: Stack, header: str) -> dict[str, str]:
    """What each dialect's own client is told."""
    options: Any = {"extra_headers": {"holdfast-approximate": header}}
    sdk = stack.sdk()
    client = stack.openai()
    messages = {}
    calls: dict[str, Callable[[], Any]] = {
        "messages": lambda: sdk.messages.create(
            model=MODEL, max_tokens=5, system=[text("x", PLAIN)], messages=MESSAGES, **options
        ),
        "count": lambda: sdk.messages.count_tokens(model=MODEL, messages=MESSAGES, **options),
        "batches": lambda: sdk.messages.batches.create(requests=[], **options),
        "chat": lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, **options),
        "completions": lambda: client.completions.create(model=MODEL, prompt="q", **options),
        "responses": lambda: client.responses.create(model=MODEL, input="q", **options),
    }
    for name, call in calls.items():
        with pytest.raises((anthropic.BadRequestError, openai.BadRequestError)) as raised:
            call()
        messages[name] = str(raised.value.body)
    for path in (f"models/{MODEL}:generateContent", "cachedContents"):
        content = {"contents": [{"role": "user", "parts": [{"text": "q"}]}]}
        request = content if "models" in path else {**content, "model": f"models/{MODEL}"}
        reply = httpx.post(
            f"{stack.url}/v1beta/{path}",
            json=request,
            headers={"x-goog-api-key": API_KEY, "holdfast-approximate": header},
            timeout=120,
            trust_env=False,
        )
        assert reply.status_code == 400, reply.text
        messages[path] = reply.json()["error"]["message"]
    return messages


@pytest.mark.parametrize(
    "header, why",
    [
        ("keep=0.05", ">= 0.1"),
        ("keep=1", "< 1.0"),
        ("keep=nan", "float"),
        ("keep=0.5; scorer=best", "scorer"),
        ("keep=0.5; keep=0.6", "there twice"),
        ("keep=0.5,blocks", "float"),
        ("scorer=kvzip", "must have one of"),
        ("keep=0.5; block=anywhere", "must have one of"),
        ("keep=0.5; sibling=true", "must have one of"),
        ("sibling=false", "must have one of"),
        ("sibling=true; scorer=h2o", "`scorer` is for `keep`"),
        ("block=anywhere", "a `block` has a marker"),
        ("", "unknown field"),
    ],
)
def test_a_header_that_is_no_choice_is_refused_by_name(stack: Stack, header: str, why: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="holdfast-approximate: .*" + why):
        stack.sdk().messages.create(
            model=MODEL,
            max_tokens=5,
            messages=MESSAGES,
            extra_headers={"holdfast-approximate": header},
        )


def test_a_header_that_is_not_allowed_is_refused_in_every_dialect(stack: Stack) -> None:
    messages = asked_of_all(stack, "keep=0.5; scorer=keydiff")
    assert all("holdfast-approximate: " in message for message in messages.values()), messages
    not_here = {name for name, message in messages.items() if "not taken here" in message}
    assert not_here == {"batches", "cachedContents"}
    assert all(
        "may not ask for approximations" in message or "is marked" in message
        for name, message in messages.items()
        if name not in not_here
    ), messages


def test_who_asks_while_an_engine_still_measures_may_ask_again() -> None:
    """A 529, which clients repeat. An engine that knows already is asked for itself."""
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
    near = Technique(
        method="kvzip", parameter=0.5, kl=0.1, agreement=0.9, tokens=9, is_allowed=True
    )
    measuring = structs.replace(description, is_measuring=True)
    path = r"messages\.0\.content\.0\.cache_control\.holdfast\."
    with pytest.raises(StillMeasuring, match=path + "keep: this engine still measures") as caught:
        check_capabilities(ask_of(HALF), measuring)
    assert (caught.value.status, caught.value.retry_after) == (529, 5)
    with pytest.raises(StillMeasuring, match=path + "block: this engine still measures"):
        check_capabilities(ask_of(BLOCK), measuring)
    # Its sibling was measured before.
    with pytest.raises(InvalidRequest, match=path + "sibling: this engine does not read"):
        check_capabilities(ask_of(SIBLING), measuring)
    check_capabilities(ask_of(PLAIN), measuring)
    knowing = structs.replace(description, techniques=[near])
    kinds = {kind_of(capabilities) for capabilities in (description, measuring, knowing)}
    assert len(kinds) == 3, "routing asks each of them for itself"


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
        check_capabilities(ask_of(HALF), description)
    far = Technique(
        method="kvzip", parameter=0.5, kl=3.0, agreement=0.1, tokens=9, is_allowed=False
    )
    near = Technique(
        method="kvzip", parameter=0.75, kl=0.1, agreement=0.9, tokens=9, is_allowed=True
    )
    measured = Description(**{**_fields(description), "techniques": [far, near]})
    with pytest.raises(InvalidRequest, match=path + r"kvzip at 0\.5 .* KL 3\.00"):
        check_capabilities(ask_of(HALF), measured)
    check_capabilities(ask_of({**PLAIN, "holdfast": {"keep": 0.8}}), measured)
    check_capabilities(ask_of(PLAIN), description)
    with pytest.raises(InvalidRequest, match=r"holdfast\.block: this engine does not place blocks"):
        check_capabilities(ask_of(BLOCK), description)
    wrong = Technique(
        method="blocks", parameter=4, kl=2.0, agreement=0.1, tokens=9, is_allowed=False
    )
    right = Technique(
        method="blocks", parameter=32, kl=0.1, agreement=0.9, tokens=9, is_allowed=True
    )
    sibling = path.replace("keep", "sibling") + "this engine does not read entries of a sibling"
    with pytest.raises(InvalidRequest, match=sibling):
        check_capabilities(ask_of(SIBLING), measured)
    whole = Technique(
        method="sibling", parameter=3, kl=0.0, agreement=1.0, tokens=9, is_allowed=True
    )
    check_capabilities(
        ask_of(SIBLING), Description(**{**_fields(description), "techniques": [whole]})
    )
    placed = Description(**{**_fields(description), "techniques": [wrong, right]})
    with pytest.raises(InvalidRequest, match=r"block: blocks at 4 is too far .* KL 2\.00"):
        check_capabilities(ask_of(BLOCK), placed)
    mark = {"type": "ephemeral", "holdfast": {"block": "anywhere", "recompute": 40}}
    check_capabilities(ask_of(mark), placed)


def _fields(description: Description) -> dict[str, Any]:
    return {name: getattr(description, name) for name in description.__struct_fields__}

"""How earlier prompts are kept, and what can be told from two of them."""

from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Message, Prompt, TextPart
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.lower import plan_of, prompt_parameters
from gateway.prompt.fingerprint import (
    MAX_POINTS,
    Divergence,
    Fingerprint,
    compare,
    digest_parameters,
    kinds_at,
    pack,
    points_of,
    shared_bytes,
    unpack,
)
from gateway.prompt.names import find_prefixes
from gateway.prompt.sketch import (
    DIGEST_BYTES,
    MAX_SEGMENTS,
    MAX_TEXTS,
    PIECE_BYTES,
    PIECES,
    SKETCHED_BYTES,
    Sketch,
    kinds_of,
    sketch_of,
)
from tests.gateway.bodies import ASKED, WHO, body, conversation, text, tool

TOKENS = 1000


def fingerprint(request: dict[str, Any], scope: str = "scope") -> Fingerprint:
    decoded = decode_messages(msgspec.json.encode(request))
    plan = plan_of(decoded, replace(ASKED, principal=replace(WHO, scope=scope)))
    return Fingerprint(
        model=decoded.model,
        parameters=digest_parameters(prompt_parameters(decoded), scope),
        num_tools=len(plan.prompt.tools),
        num_system=len(plan.prompt.system),
        points=points_of(plan.prefixes),
        num_tokens=TOKENS,
    )


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [text(value) for value in texts]}


def kept(request: dict[str, Any]) -> Fingerprint:
    return unpack(pack(fingerprint(request)))


BASE = body(
    tools=[tool("look"), tool("listen")],
    system=[text("rule one " * 50), text("rule two " * 50)],
    messages=[user("first " * 50, "second " * 50)],
)


def test_what_is_stored_holds_no_text_and_is_keyed_by_the_scope() -> None:
    request = conversation()
    packed = pack(fingerprint(request))
    for word in (b"look", b"lease", b"Notes", b"things"):
        assert word not in packed
    ours = fingerprint(request, "ours")
    theirs = fingerprint(request, "theirs")
    assert not {p.digest for p in ours.points} & {p.digest for p in theirs.points}
    assert ours.parameters != theirs.parameters


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=300), st.data())
def test_a_changed_block_is_never_called_equal(texts: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(texts) - 1))
    changed = [*texts[:place], texts[place] + "!", *texts[place + 1 :]]
    earlier = unpack(pack(fingerprint(body(messages=[user(*texts)]))))
    difference = compare(earlier, fingerprint(body(messages=[user(*changed)])))
    assert difference is not None and difference.kind == "messages_changed"
    assert difference.segment is not None and difference.segment <= place


def test_names_by_an_earlier_rule_are_not_compared() -> None:
    later = fingerprint(BASE)
    earlier = msgspec.structs.replace(later, rule=later.rule + 1)
    assert compare(earlier, later) == Divergence("unavailable")
    assert shared_bytes(earlier, later) == 0


LINES = [f"Rule {number}: say no more than {number} words." for number in range(40)]


def digests(sketch: Sketch) -> list[bytes]:
    joined = sketch.digests
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def pieces(sketch: Sketch, segment: int) -> list[bytes]:
    joined = dict(sketch.pieces)[segment]
    return [joined[at : at + PIECE_BYTES] for at in range(0, len(joined), PIECE_BYTES)]


def system(*texts: str) -> Prompt:
    return Prompt([Message("user", [TextPart("x")])], system=[TextPart(text) for text in texts])


def test_another_scope_gives_other_digests() -> None:
    first = sketch_of(system("\n".join(LINES)), "a")
    second = sketch_of(system("\n".join(LINES)), "b")
    assert not set(digests(first)) & set(digests(second))
    assert not set(pieces(first, 0)) & set(pieces(second, 0))


def test_a_sketch_is_bounded() -> None:
    many = sketch_of(system(*(f"{n} " + "word " * 40 for n in range(3000))), "scope")
    assert len(digests(many)) == len(many.sizes) == MAX_SEGMENTS
    assert len(many.pieces) == MAX_TEXTS
    assert all(len(piece) <= PIECES * PIECE_BYTES for _, piece in many.pieces)
    assert len(msgspec.msgpack.encode(many)) < 1500
    large = sketch_of(system("a" * SKETCHED_BYTES, "b"), "scope")
    assert large.digests == b""


def test_of_a_long_prompt_the_last_points_stay_with_their_tokens_and_kinds() -> None:
    prompt = Prompt([Message("user", [TextPart(str(n))]) for n in range(900)])
    points = points_of(find_prefixes(prompt, "scope"))
    whole = Fingerprint(
        model="m",
        parameters=b"",
        num_tools=0,
        num_system=0,
        points=points,
        tokens=[10 * (n + 1) for n in range(900)],
        kinds=kinds_at(points, kinds_of(prompt)),
        marks=[(899, "5m")],
        sketch=sketch_of(prompt, "scope"),
        unheld=[899],
    )
    packed = pack(whole)
    unpacked = unpack(packed)
    assert len(packed) < 5000
    assert len(unpacked.points) == len(unpacked.tokens) == len(unpacked.kinds) <= MAX_POINTS
    assert [point.segment for point in unpacked.points[-20:]] == list(range(880, 900))
    assert unpacked.tokens == [10 * (point.segment + 1) for point in unpacked.points]
    assert (unpacked.marks, unpacked.unheld) == ([(899, "5m")], [899])

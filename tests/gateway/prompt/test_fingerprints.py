from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.lower import plan_of, prompt_parameters
from gateway.dialects.anthropic.request import decode_messages
from gateway.prompt.fingerprint import (
    MAX_POINTS,
    Divergence,
    Fingerprint,
    compare,
    digest_parameters,
    pack,
    points_of,
    shared_bytes,
    unpack,
)
from tests.gateway.bodies import LONG, body, conversation, text, tool

TOKENS = 1000


def fingerprint(request: dict[str, Any], scope: str = "scope") -> Fingerprint:
    decoded = decode_messages(msgspec.json.encode(request))
    plan = plan_of(decoded, scope)
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


@pytest.mark.parametrize(
    "changes, kind, segment",
    [
        ({"model": "other"}, "model_changed", 0),
        ({"tools": [tool("listen"), tool("look")]}, "tools_changed", 0),
        ({"tools": [tool("look")]}, "tools_changed", 1),
        ({"tools": [tool("look"), tool("listen"), tool("more")]}, "tools_changed", 2),
        ({"tools": []}, "tools_changed", 0),
        ({"system": [text("rule one " * 50)]}, "system_changed", 3),
        ({"system": [text("rule one " * 50), text("other")]}, "system_changed", 3),
        ({"system": []}, "system_changed", 2),
        ({"messages": [user("other")]}, "messages_changed", 4),
        ({"messages": [user("first " * 50, "other")]}, "messages_changed", 5),
        ({"tools": [tool("x")], "messages": [user("other")]}, "tools_changed", 0),
        ({"system": "x", "tools": [tool("x")]}, "tools_changed", 0),
        ({"tool_choice": {"type": "none"}}, "unavailable", None),
        ({"output_config": {"effort": "low"}}, "unavailable", None),
        ({"thinking": {"type": "adaptive"}}, "unavailable", None),
    ],
)
def test_the_first_difference_is_named(
    changes: dict[str, Any], kind: str, segment: int | None
) -> None:
    found = compare(kept(BASE), fingerprint(body(**{**BASE, **changes})))
    assert found is not None
    assert (found.kind, found.segment) == (kind, segment)
    assert (found.missed_tokens is None) == (kind == "unavailable")
    if kind == "model_changed":
        assert found.missed_tokens == TOKENS
    elif found.missed_tokens is not None:
        assert 0 < found.missed_tokens <= TOKENS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_tokens": 99, "temperature": 0.5, "stop_sequences": ["x"]},
        {"tool_choice": {"type": "auto"}},
        {"output_config": {"effort": "high"}},
        {"thinking": {"type": "disabled"}},
        {"cache_control": LONG},
        {"messages": [*BASE["messages"], {"role": "assistant", "content": "ok"}, user("next")]},
        {"messages": [user("first " * 50, "second " * 50, "third")]},
        {"messages": [user("first " * 50)]},
    ],
)
def test_growth_and_what_is_not_in_the_prompt_are_no_divergence(changes: dict[str, Any]) -> None:
    assert compare(kept(BASE), fingerprint(body(**{**BASE, **changes}))) is None


def test_a_fingerprint_is_bounded_and_still_brackets_the_difference() -> None:
    texts = [f"part {number}" for number in range(3000)]
    packed = pack(fingerprint(body(messages=[user(*texts)])))
    assert len(unpack(packed).points) <= MAX_POINTS
    assert len(packed) < 4000
    grown = fingerprint(body(messages=[user(*texts, "more")]))
    assert compare(unpack(packed), grown) is None
    texts[1000] = "changed"
    found = compare(unpack(packed), fingerprint(body(messages=[user(*texts)])))
    assert found is not None and found.kind == "messages_changed"
    assert found.segment is not None and 1000 - 3000 / 64 < found.segment <= 1000


def test_beyond_what_was_kept_it_says_that_it_does_not_know() -> None:
    texts = [f"part {number}" for number in range(3000)]
    earlier = unpack(pack(fingerprint(body(messages=[user(*texts)]))))
    cut = [*texts[:1501], "other"]
    assert compare(earlier, fingerprint(body(messages=[user(*cut)]))) == Divergence("unavailable")


def test_what_is_stored_holds_no_text_and_is_keyed_by_the_scope() -> None:
    request = conversation()
    packed = pack(fingerprint(request))
    for word in (b"look", b"lease", b"Notes", b"things"):
        assert word not in packed
    ours, theirs = fingerprint(request, "ours"), fingerprint(request, "theirs")
    assert not {p.digest for p in ours.points} & {p.digest for p in theirs.points}
    assert ours.parameters != theirs.parameters


@given(
    st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=300),
    st.data(),
)
def test_a_changed_block_is_never_called_equal(texts: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(texts) - 1))
    changed = [*texts[:place], texts[place] + "!", *texts[place + 1 :]]
    earlier = unpack(pack(fingerprint(body(messages=[user(*texts)]))))
    found = compare(earlier, fingerprint(body(messages=[user(*changed)])))
    assert found is not None and found.kind == "messages_changed"
    assert found.segment is not None and found.segment <= place


def test_names_by_an_earlier_rule_are_not_compared() -> None:
    later = fingerprint(BASE)
    earlier = msgspec.structs.replace(later, rule=later.rule + 1)
    assert compare(earlier, later) == Divergence("unavailable")
    assert shared_bytes(earlier, later) == 0

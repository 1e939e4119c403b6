"""What a salt of the client narrows: names, and what is said of two prompts."""

import pytest

from engine.protocol import Prompt, TextPart
from engine.protocol.reports import AdapterInfo
from gateway.base.errors import InvalidRequest
from gateway.prompt.fingerprint import Fingerprint, compare
from gateway.prompt.names import salt_of
from gateway.prompt.plan import Plan, make_plan
from gateway.prompt.slots import Slot
from gateway.prompt.wish import ApproximateMark
from tests.gateway.bodies import lowered_chat

SCOPE = "ab" * 16
TURNS = [{"role": "user", "content": "Hi " * 900}]


def planned(cache_salt: str | None) -> Plan:
    plan: Plan = lowered_chat({"model": "m", "messages": TURNS, "cache_salt": cache_salt}).plan
    return plan


def printed(plan: Plan) -> Fingerprint:
    return plan.fingerprint("m", b"", 900, is_shared=True, name_tokens=())


def test_names_of_two_salts_have_nothing_in_common() -> None:
    plans = [planned(salt) for salt in (None, "one", "two")]
    names = [{prefix.name.digest for prefix in plan.prefixes} for plan in plans]
    assert all(names)
    assert names[0].isdisjoint(names[1]) and names[1].isdisjoint(names[2] | names[0])
    assert planned("one").names == plans[1].names


def test_a_salt_is_the_workspaces_own_and_not_the_clients_word() -> None:
    assert salt_of(None, SCOPE) == ""
    assert salt_of("one", SCOPE) == salt_of("one", SCOPE) != salt_of("one", "cd" * 16)
    assert len(salt_of("one", SCOPE)) == 64 and b"one".hex() not in salt_of("one", SCOPE)


def test_nothing_is_said_of_prompts_with_other_salts() -> None:
    """Their names differ from the first on, and still nothing of them may have changed."""
    comparison = compare(printed(planned("one")), printed(planned("two")))
    assert comparison is not None and comparison.kind == "unavailable"
    assert compare(printed(planned("one")), printed(planned("one"))) is None


def test_a_salt_is_refused_beside_what_it_does_not_keep_apart() -> None:
    prompt = Prompt([], system=[TextPart("Rules.")])
    slots = [Slot(path="system", marker="5m", num_markers=1)]
    salt = salt_of("one", SCOPE)
    adapter = AdapterInfo(name="a", digest="ab" * 32, rank=1, num_bytes=1)
    with pytest.raises(InvalidRequest, match="cache_salt: excludes adapters"):
        make_plan(prompt, slots, None, SCOPE, adapter=adapter, salt=salt)
    wish = ApproximateMark(part=0.5)
    with pytest.raises(InvalidRequest, match="cache_salt: excludes approximations"):
        make_plan(prompt, slots, None, SCOPE, wish=wish, salt=salt)

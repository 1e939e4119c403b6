"""Near-duplicates among turns that were really sent, and what the engine itself saves on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.fleet import Gateway, running_fleet
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

FAST = {
    "ENGINE_SYNTHETIC_PREFILL_US": "0",
    "ENGINE_SYNTHETIC_DECODE_MS": "0",
    "ENGINE_MIN_CACHE_TOKENS": "64",
}
TOOLS = [
    {"name": name, "description": f"It {name}s.", "input_schema": {"type": "object"}}
    for name in ("find", "read", "send")
]
DATED = "Today is {}, 2026.\n" + "".join(f"Rule {n} of the house.\n" for n in range(60))
NONCE = "Session 0000{}9f4c2b.\n" + "".join(f"Step {n} of the work.\n" for n in range(60))
TOOLED = "".join(f"Point {n} of the guide.\n" for n in range(60))


def test_near_duplicates_are_named_and_save_what_is_then_read(tmp_path: Path) -> None:
    with running_fleet(tmp_path, settings=FAST) as fleet:
        check(fleet.gateway)


def check(admin: Gateway) -> None:
    keys = {}
    for name, days in (("kept", 1), ("unkept", None), ("as-one", None)):
        admin.workspace(name, keep_days=days)
        keys[name] = [admin.make_key(name)[1] for _ in range(2)]
    num_turns = 0
    writes = {}

    def ask(key: str, system: str, tools: Any = ()) -> dict[str, Any]:
        nonlocal num_turns
        num_turns += 1
        asking = replace(admin, workspace_key=key)
        answer = asking.answer(system, f"Question {num_turns}?", tools=list(tools))
        usage: dict[str, Any] = answer["usage"]
        return usage

    first, second = keys["kept"]
    pairs = {
        "date": ((DATED.format("November 26"), ()), (DATED.format("November 27"), ())),
        "nonce": ((NONCE.format("a81"), ()), (NONCE.format("b77"), ())),
        "tool_order": ((TOOLED, TOOLS), (TOOLED, TOOLS[::-1])),
    }
    for kind, (first_prompt, second_prompt) in pairs.items():
        ask(first, *first_prompt)
        writes[kind] = ask(second, *second_prompt)["cache_creation_input_tokens"]
    ask(keys["unkept"][0], DATED.format("November 25"))
    ask(keys["unkept"][1], DATED.format("November 24"))
    eventually(lambda: len(admin.get("turns?limit=100")) == num_turns)

    def advised(asking: Admin, **of: Any) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = asking.post("advise", of)["near_duplicates"]
        return groups

    # What is kept is written behind the answer.
    eventually(lambda: all(group["is_compared"] for group in advised(admin, workspace="kept")))
    by_kind = {group["kind"]: group for group in advised(admin, workspace="kept")}
    assert set(by_kind) == set(pairs)
    for kind, path in (("date", "system.0"), ("nonce", "system.0"), ("tool_order", "tools.0")):
        near = by_kind[kind]
        assert (near["path"], near["num_prefixes"], near["num_turns"]) == (path, 2, 2)
        assert near["workspace"] == "kept" and "of 2 keys" in near["text"]
        # Sent with one name, the second turn reads what it wrote: to the token.
        prompt, _ = pairs[kind]
        ask(keys["as-one"][0], *prompt)
        read_tokens = ask(keys["as-one"][1], *prompt)["cache_read_input_tokens"]
        assert near["tokens"] == read_tokens == writes[kind] > 0
    (unkept,) = advised(admin, workspace="unkept")
    assert (unkept["kind"], unkept["is_compared"]) == ("varying_text", False)
    assert unkept["num_prefixes"] == 2 and "November" not in str(by_kind) + str(unkept)
    # A workspace's key sees its own alone; who may not read prompts is told by digests alone.
    assert {group["workspace"] for group in advised(Admin(admin.url, first))} == {"kept"}
    _, reader = admin.make_key("kept", scope="read_only_admin")
    of_reader = advised(Admin(admin.url, reader), workspace="kept")
    assert not any(group["is_compared"] for group in of_reader) and len(of_reader) == 3

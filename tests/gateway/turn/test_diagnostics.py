"""Cache diagnostics through the official SDK (spec 2.11, vectors V114 to V119)."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from gateway.base.background import Background
from gateway.base.catalogue import CatalogueModel
from gateway.cli.main import main
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.lower import ask_of
from gateway.dialects.lowering import RequestContext
from gateway.prompt.ask import Ask, Compared, Principal
from gateway.turn.diagnostics import Diagnosis, PromptComparer
from tests.gateway.bodies import SHORT, body, text, tool
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, eventually, make_settings, migrate, serve, serve_gateway

BASE: dict[str, Any] = {
    "system": [text("rule one " * 100), text("rule two " * 100, SHORT)],
    "tools": [tool("look"), tool("listen")],
    "messages": [{"role": "user", "content": "first " * 200}],
}
GROWN = [
    *BASE["messages"],
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "b"},
]


def create(stack: Stack, previous: str | None, **changes: Any) -> Any:
    diagnostics = {"previous_message_id": previous}
    return stack.sdk().messages.create(**body(diagnostics=diagnostics, **{**BASE, **changes}))


def reason(message: Any) -> tuple[str, int | None]:
    miss = message.diagnostics.cache_miss_reason
    return miss.type, getattr(miss, "cache_missed_input_tokens", None)


def test_without_the_object_and_on_a_first_turn_there_is_none_v114(stack: Stack) -> None:
    assert stack.sdk().messages.create(**body(**BASE)).diagnostics is None
    assert create(stack, None).diagnostics is None


def test_growth_is_no_divergence_v115(stack: Stack) -> None:
    first = create(stack, None)
    second = create(stack, first.id, messages=GROWN)
    assert second.diagnostics is None
    assert create(stack, second.id, messages=GROWN, max_tokens=9).diagnostics is None


@pytest.mark.parametrize(
    "changes, kind",
    [
        ({"tools": [tool("listen"), tool("look")]}, "tools_changed"),
        ({"system": "other"}, "system_changed"),
        ({"messages": [{"role": "user", "content": "other"}]}, "messages_changed"),
        # V119: tools come first.
        ({"tools": [], "messages": [{"role": "user", "content": "x"}]}, "tools_changed"),
        ({"tools": [], "system": "other"}, "tools_changed"),
    ],
)
def test_the_earliest_change_is_named_with_what_it_cost_v116(
    stack: Stack, changes: dict[str, Any], kind: str
) -> None:
    first = create(stack, None)
    named, missed = reason(create(stack, first.id, **changes))
    usage = first.usage
    total = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert named == kind
    assert missed is not None and 0 < missed <= total


def test_another_model_is_named_v116(stack: Stack) -> None:
    first = create(stack, None)
    kind, missed = reason(create(stack, first.id, model="scripted"))
    assert kind == "model_changed" and missed is not None and missed > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"output_config": {"effort": "low"}},
        {"thinking": {"type": "adaptive"}},
        {"extra_headers": {"anthropic-beta": "interleaved-thinking-2025-05-14"}},
    ],
)
def test_only_other_parameters_differ_v118(stack: Stack, changes: dict[str, Any]) -> None:
    first = create(stack, None)
    assert reason(create(stack, first.id, **changes)) == ("unavailable", None)


def test_what_cannot_be_compared_with_is_not_found_v117(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = ("previous_message_not_found", None)
    assert reason(create(stack, "msg_unknown")) == expected
    silent = stack.sdk().messages.create(**body(**BASE))
    assert reason(create(stack, silent.id)) == expected
    monkeypatch.setenv("HOLDFAST_DATA", str(stack.data))
    capsys.readouterr()
    assert main(["keys", "create", "--workspace", "stranger"]) == 0
    # The gateway of this process may log at the same time.
    key = next(word for word in capsys.readouterr().out.split() if word.startswith("hf-"))
    theirs = stack.sdk(key).messages.create(
        **body(diagnostics={"previous_message_id": None}, **BASE)
    )
    assert finished(stack, theirs.id) == expected
    assert finished(stack, "msg_" + "0" * 28) == expected, "which another gateway may have made"


def finished(stack: Stack, previous: str, **changes: Any) -> tuple[str, int | None]:
    """Ask until the comparison ended before the response began."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        message = create(stack, previous, **changes)
        if message.diagnostics.cache_miss_reason is not None:
            return reason(message)
        stack.engine.wait_seconds += 1.0
    raise AssertionError("no comparison ended in time")


async def never(turn_id: str, workspace: str) -> bytes | None:
    """A database that does not answer."""
    await asyncio.Event().wait()
    return None


def comparing(workspace: str, previous: str) -> Ask:
    decoded = decode_messages(msgspec.json.encode(body()))
    who = Principal(workspace, "k", workspace)
    ask = ask_of(
        decoded, RequestContext(who, CatalogueModel(id="m", display_name="m"), 0.0), "2023-06-01"
    )
    return replace(ask, comparison=Compared(is_wanted=True, previous=previous))


@pytest.mark.anyio
async def test_what_is_anothers_takes_the_way_of_what_is_not_there() -> None:
    """Not even the time that an answer takes tells them apart."""
    background = Background()
    diagnostics = PromptComparer(never, background)
    theirs = "msg_" + "1" * 28
    nobodys = "msg_" + "0" * 28
    fingerprint = comparing("owner", nobodys).fingerprint(5, ())
    diagnostics.remember("owner", theirs, fingerprint, "k")
    diagnoses = {}
    for workspace, previous in (("owner", theirs), ("stranger", theirs), ("stranger", nobodys)):
        comparison = diagnostics.begin(comparing(workspace, previous))
        assert comparison is not None
        await asyncio.sleep(0)
        diagnoses[workspace, previous] = comparison.diagnosis(fingerprint)
    assert diagnoses["owner", theirs].result == "compared"
    assert (
        diagnoses["stranger", theirs] == diagnoses["stranger", nobodys] == Diagnosis("unfinished")
    )
    await background.close(0.0)


def test_streamed_it_is_in_message_start(stack: Stack) -> None:
    first = create(stack, None)
    diagnostics = {"previous_message_id": first.id}
    with stack.http() as http:
        reply = http.post(
            "/v1/messages",
            json=body(**{**BASE, "system": "other"}, stream=True, diagnostics=diagnostics),
        )
    line = next(line for line in reply.text.split("\n") if '"message_start"' in line)
    started = msgspec.json.decode(line.removeprefix("data: "))
    assert started["message"]["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    with stack.sdk().messages.stream(**body(**BASE, diagnostics=diagnostics)) as stream:
        assert stream.get_final_message().diagnostics is None


def test_turns_of_another_gateway_and_of_an_earlier_run_are_compared(tmp_path: Path) -> None:
    """Both share the ledger; the second gateway finds the first one's turn there."""
    engine = ScriptedEngine()
    ledger = f"sqlite+aiosqlite:///{tmp_path}/shared.db"
    migrate(make_settings(tmp_path, "http://127.0.0.1:9", database_url=ledger))
    with serve(engine) as engine_url:
        with serve_gateway(tmp_path / "one", engine_url, database_url=ledger) as url:
            stack = Stack(url, engine, tmp_path)
            first = create(stack, None)
        with serve_gateway(tmp_path / "two", engine_url, database_url=ledger) as two:
            stack = Stack(two, engine, tmp_path, stack.sdks)
            assert finished(stack, first.id, system="other")[0] == "system_changed"
    stack.close()


def test_an_operator_compares_any_two_turns_of_the_ledger(stack: Stack) -> None:
    first = stack.sdk().messages.create(**body(**BASE))
    two = stack.sdk().messages.create(**body(**{**BASE, "messages": GROWN}))
    three = stack.sdk().messages.create(**body(**{**BASE, "system": "other"}))
    ids = {first.id, two.id, three.id}
    eventually(lambda: ids <= {turn["id"] for turn in stack.admin("turns").json()})
    grown = stack.admin(f"turns/{two.id}/divergence?from={first.id}").json()
    assert (grown["turn"], grown["earlier"]) == (two.id, first.id)
    assert {grown[name] for name in ("kind", "segment", "missed_tokens", "missed_nano")} == {None}
    assert grown["shared_tokens"] == grown["earlier_tokens"]
    changed = stack.admin(f"turns/{three.id}/divergence?from={two.id}").json()
    assert (changed["kind"], changed["segment"]) == ("system_changed", 2)
    assert changed["missed_tokens"] > 0
    assert (changed["section"], changed["block"], changed["characters"]) == ("system", 0, 0)
    # Nobody named an earlier turn: one that shares most, of which this one only grew.
    nearest = stack.admin(f"turns/{two.id}/divergence").json()
    assert (nearest["kind"], nearest["shared_tokens"]) == (None, nearest["earlier_tokens"])
    missing = stack.admin(f"turns/{first.id}/divergence?from=msg_none")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    headers = {"x-api-key": API_KEY}
    path = f"{stack.url}/admin/v1/turns/{first.id}/divergence?from={two.id}"
    assert httpx.get(path, headers=headers, timeout=120).status_code == 200

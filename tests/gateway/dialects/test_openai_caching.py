"""Caching in OpenAI's APIs: breakpoints, TTLs, prewarming, diagnostics, and policies of keys."""

from pathlib import Path
from typing import Any

import pytest

from engine.protocol import FIRST_TTLS, Finished
from tests.gateway.admin_client import Admin
from tests.gateway.conftest import Stack, stacked
from tests.gateway.openai_bodies import LONG_TEXT, MODEL, chat, frames
from tests.gateway.responses_bodies import LOOK, asked, refused, user
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ADMIN_KEY

TALK = [user(LONG_TEXT), {"role": "assistant", "content": "Yes."}, user("And now?")]
MARK = {"mode": "explicit"}


def marked(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_text", "text": text, "prompt_cache_breakpoint": {**MARK, **more}}


def sent(stack: Stack) -> list[tuple[int, str]]:
    return [(point.segment, point.ttl) for point in stack.engine.requests[-1].breakpoints]


def posted(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    with stack.http(ADMIN_KEY) as http:
        reply = http.post(f"/admin/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_who_marks_nothing_reads_the_prompt_before(stack: Stack) -> None:
    first = asked(stack, instructions="Rules.", tools=[LOOK], input=TALK[:1])
    assert sent(stack) == [(1, "5m"), (2, "5m")]
    details = first["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == 0
    assert details["cache_write_tokens"] > len(LONG_TEXT) // 4
    assert "cache_write_tokens_details" not in details, "they are held for five minutes"
    second = asked(stack, instructions="Rules.", tools=[LOOK], input=TALK)
    assert sent(stack) == [(1, "5m"), (2, "5m"), (4, "5m")]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == details["cache_write_tokens"]
    assert second["holdfast"]["auto_cache"] == {"mode": "conversation", "ttl": "5m"}
    paths = [point["path"] for point in second["holdfast"]["breakpoints"]]
    assert paths == ["instructions", "input[0].content[0]", "input[2].content[0]"]


def test_options_are_the_clients_own(stack: Stack) -> None:
    implicit = asked(stack, input=TALK, prompt_cache_options={})
    assert sent(stack) == [(2, "30m")]
    details = implicit["usage"]["input_tokens_details"]
    shares = {"ttl_30m_tokens": details["cache_write_tokens"], "ttl_12h_tokens": 0}
    assert details["cache_write_tokens_details"] == shares
    assert implicit["prompt_cache_options"] == {"mode": "implicit", "ttl": "30m"}
    assert "auto_cache" not in implicit["holdfast"]
    asked(stack, input=TALK, prompt_cache_options=MARK)
    assert sent(stack) == []


def test_of_many_breakpoints_the_latest_count(stack: Stack) -> None:
    content = [marked(f"{LONG_TEXT} {n}") for n in range(6)]
    talk = [{"role": "user", "content": content}]
    asked(stack, input=talk, prompt_cache_options=MARK)
    assert sent(stack) == [(2, "30m"), (3, "30m"), (4, "30m"), (5, "30m")]
    asked(stack, input=[*talk, user("x")], prompt_cache_options={"mode": "implicit"})
    assert sent(stack) == [(3, "30m"), (4, "30m"), (5, "30m"), (6, "30m")]
    asked(stack, input=[*talk, user("x")])
    assert sent(stack) == [(3, "30m"), (4, "30m"), (5, "30m"), (6, "5m")]
    short = asked(stack, input=TALK, prompt_cache_retention="in_memory")
    assert "ignored" not in short["holdfast"]
    day = asked(stack, input=TALK, prompt_cache_retention="24h")
    assert [entry["path"] for entry in day["holdfast"]["ignored"]] == ["prompt_cache_retention"]
    error = refused(stack, input=[{"role": "user", "content": [marked("")]}])
    assert error["param"] == "input[0].content[0]"


def written_for(answer: dict[str, Any]) -> tuple[int, int]:
    """The tokens that were written for 30 minutes, and for 12 hours."""
    details = answer["usage"]["input_tokens_details"]
    shares = details["cache_write_tokens_details"]
    assert sum(shares.values()) == details["cache_write_tokens"]
    return shares["ttl_30m_tokens"], shares["ttl_12h_tokens"]


def test_twelve_hours_are_held_and_billed_as_such(stack: Stack) -> None:
    answer = asked(stack, input=TALK, prompt_cache_options={"ttl": "12h"})
    assert sent(stack) == [(2, "12h")]
    assert answer["prompt_cache_options"] == {"mode": "implicit", "ttl": "12h"}
    assert "ignored" not in answer["holdfast"]
    short, long = written_for(answer)
    assert short == 0 < long
    row = Admin(stack.url).recorded(f"msg_{answer['id'].removeprefix('resp_')}")
    assert row["cache_write_12h_tokens"] == long and row["prefix_ttl"] == "12h"
    assert row["cache_write_5m_tokens"] == row["cache_write_30m_tokens"] == 0


def test_a_requests_ttl_is_the_least_of_each_breakpoint(stack: Stack) -> None:
    parts = [marked(f"{LONG_TEXT} 1", ttl="30m"), marked(f"{LONG_TEXT} 2", ttl="12h")]
    parts += [marked(f"{LONG_TEXT} 3")]
    talk = [{"role": "user", "content": parts}]
    # What stands in front of a longer one is held as long as that, and costs no more.
    answer = asked(stack, input=talk, prompt_cache_options=MARK)
    assert sent(stack) == [(0, "12h"), (1, "12h"), (2, "30m")]
    short, long = written_for(answer)
    assert 0 < short < long
    asked(stack, input=talk, prompt_cache_options={**MARK, "ttl": "12h"})
    assert sent(stack) == [(0, "12h"), (1, "12h"), (2, "12h")]
    last = [{"role": "user", "content": [marked(LONG_TEXT, ttl="12h")]}]
    asked(stack, input=last, prompt_cache_options={"mode": "implicit"})
    assert sent(stack) == [(0, "12h")], "the client's own stands where the implicit one would"


def test_an_engine_of_before_the_class_holds_its_longest_and_the_answer_says_so(
    tmp_path: Path,
) -> None:
    with stacked(tmp_path, ScriptedEngine(ttls=FIRST_TTLS)) as stack:
        answer = asked(stack, input=TALK, prompt_cache_options={"ttl": "12h"})
        assert sent(stack) == [(2, "1h")]
        assert answer["prompt_cache_options"] == {"mode": "implicit", "ttl": "30m"}
        (ignored,) = answer["holdfast"]["ignored"]
        assert ignored["path"] == "input[2].content[0]"
        assert ignored["reason"] == "this engine can't hold it for 12 hours: it holds it for 1 hour"
        assert written_for(answer)[1] == 0
        row = Admin(stack.url).recorded(f"msg_{answer['id'].removeprefix('resp_')}")
        assert row["cache_write_12h_tokens"] == 0 and row["prefix_ttl"] == "1h"


def test_prewarming_writes_and_generates_nothing(stack: Stack) -> None:
    options = {"tool_choice": "required", "prompt_cache_options": {"prewarm": True}}
    answer = asked(stack, input=TALK[:1], tools=[LOOK], **options)
    (request,) = stack.engine.requests
    assert request.sampling.max_tokens == 0
    assert request.tool_choice.mode == "auto"
    assert answer["status"] == "completed"


def test_generating_nothing_is_prewarming(stack: Stack) -> None:
    asked(stack, input=TALK[:1], generate=True)
    assert stack.engine.requests[-1].sampling.max_tokens is None
    options = {"tool_choice": "required", "generate": False}
    stack.engine.script = frames(Finished(reason="length", output_tokens=0))
    answer = asked(stack, input=TALK[:1], tools=[LOOK], **options)
    request = stack.engine.requests[-1]
    assert request.sampling.max_tokens == 0
    assert request.tool_choice.mode == "auto"
    assert sent(stack) == [(1, "30m")], "the prompt's end is held"
    assert (answer["status"], answer["output"]) == ("completed", [])


def test_a_response_is_compared_with_an_earlier_one(stack: Stack) -> None:
    first = asked(stack, instructions="Rules.", input=TALK[:1])

    def diagnosed(response_id: str, **body: Any) -> Any:
        options = {"comparison_response_id": response_id}
        answer = asked(stack, **{"instructions": "Rules.", **body}, prompt_cache_options=options)
        assert answer["prompt_cache_options"]["comparison_response_id"] == response_id
        return answer["prompt_cache_diagnostics"]

    assert diagnosed(first["id"], input=TALK) == {"type": "unavailable"}, "not a marked place"
    asked(stack, instructions="Rules.", input=TALK)
    assert diagnosed(first["id"], input=TALK) == {"type": "cache_hit"}
    changed = diagnosed(first["id"], input=[user("Other.")])
    assert (changed["type"], changed["reason"]) == ("cache_miss", "input_changed")
    tools = diagnosed(first["id"], input=TALK, tools=[LOOK])
    assert (tools["type"], tools["reason"]) == ("cache_miss", "tools_changed")
    nobody = diagnosed("resp_" + "0" * 28, input=TALK)
    assert nobody["type"] in ("comparison_response_not_found", "unavailable")


@pytest.mark.parametrize("speaks", ["chat", "responses"])
def test_keys_and_workspaces_have_policies(stack: Stack, speaks: str) -> None:
    posted(stack, "workspaces", id=f"w-{speaks}", auto_cache="off")
    created = posted(stack, "keys", workspace=f"w-{speaks}")
    assert created["info"]["auto_cache"] is None

    def ask() -> list[tuple[int, str]]:
        client = stack.openai(created["key"])
        says: Any = [{"role": "system", "content": LONG_TEXT}, {"role": "user", "content": "Hi"}]
        if speaks == "chat":
            client.chat.completions.create(model=MODEL, messages=says)
        else:
            client.responses.create(model=MODEL, instructions=LONG_TEXT, input="Hi")
        return sent(stack)

    assert ask() == []
    posted(stack, f"workspaces/w-{speaks}", auto_cache="prefix", auto_cache_ttl="1h")
    assert ask() == [(0, "1h")]
    key = posted(stack, f"keys/{created['info']['id']}", auto_cache="conversation")
    assert key["auto_cache"] == "conversation"
    assert ask() == [(0, "1h"), (1, "1h")]
    posted(stack, f"keys/{created['info']['id']}", auto_cache=None)
    posted(stack, f"workspaces/w-{speaks}", auto_cache=None, auto_cache_ttl=None)
    assert ask() == [(0, "5m"), (1, "5m")]


def test_in_chat_completions_the_clients_markers_are_all(stack: Stack) -> None:
    hi = {"role": "user", "content": "Hi"}
    anthropic = {"cache_control": {"type": "ephemeral"}}
    native = {"prompt_cache_breakpoint": MARK}
    for marker, expected in ((anthropic, [(0, "5m")]), (native, [(0, "30m"), (1, "5m")])):
        content = [{"type": "text", "text": LONG_TEXT, **marker}]
        chat(stack, messages=[{"role": "system", "content": content}, hi])
        assert sent(stack) == expected
    stack.post("/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": [hi]})
    assert sent(stack) == [], "the Messages API caches what its client marks"

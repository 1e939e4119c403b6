"""GET /admin/v1/advice/summary, over a week in a real ledger."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest

from gateway.admin import advice
from gateway.advice.summary import summary_lines
from gateway.structs.advice import StreamAdvice
from tests.gateway.admin_client import Admin
from tests.gateway.advice.weeks import NUM, RULES, unread_text, week
from tests.gateway.serving import serve_gateway

SIZE = len(RULES) // 4
SUMMARY = "advice/summary"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    data = tmp_path_factory.mktemp("summary")
    turns = list(week())
    with serve_gateway(data, "http://127.0.0.1:9", turns=turns) as url:
        yield Admin(url)


def test_each_sentence_has_its_number_and_its_turns(gateway: Admin) -> None:
    summary = gateway.get(SUMMARY)
    by = {(line["kind"], line["workspace"]): line for line in summary["lines"]}
    fault = by["fault", "nonces"]
    assert "system.0" in fault["text"] and "new in every request" in fault["text"]
    assert fault["num_turns"] == NUM - 1 and fault["turns"]
    # Written and never read: a quarter of their tokens more than without markers.
    unread = by["unpaid", "unread"]
    written_tokens = sum(len(unread_text(number)) // 4 for number in range(NUM))
    assert unread["multiples"] == round(written_tokens * 0.25, 1)
    assert f"{written_tokens:,} tokens were written and 0 were read" in unread["text"]
    assert unread["nano"] == written_tokens * 250
    assert unread["turns"] == [f"msg_unread_{n}" for n in (29, 28, 27, 26, 25)]
    # Twelve minutes apart: an hour's writes are 2 and 29 reads, five minutes' are 30 writes.
    (slow,) = (line for line in summary["lines"] if line["kind"] == "ttl")
    assert slow["workspace"] == "slow" and slow["page"] == "savings"
    assert slow["text"].startswith("1 prefix would have been cheaper with a 1-hour TTL")
    assert slow["multiples"] == pytest.approx(SIZE * (30 * 1.25 - 2 - 29 * 0.1), abs=0.1)
    assert slow["nano"] == round(SIZE * (30 * 1250 - 2000 - 29 * 100))
    assert (slow["num_turns"], slow["turns"]) == (NUM, ["msg_slow_29"])
    assert all(line["turns"] for line in summary["lines"])
    worths = [line["multiples"] for line in summary["lines"]]
    assert worths == sorted(worths, reverse=True)
    about = [line["workspace"] for line in summary["lines"]]
    assert sorted(about) == ["nonces", "slow", "unmarked", "unread"], "each thing once"
    assert summary["num_more"] == 0


def test_a_line_says_what_its_page_says(gateway: Admin) -> None:
    summary = gateway.get(f"{SUMMARY}?workspace=unmarked")
    body = {
        "workspace": "unmarked",
        "since_ms": summary["since_ms"],
        "until_ms": summary["until_ms"],
    }
    (stream,) = gateway.post("advise", body)["streams"]
    (line,) = summary["lines"]
    assert line["kind"] == "markers" and line["page"] == "advice"
    assert line["text"] == f"Workspace unmarked, key {stream['key']} with m: {stream['text']}"
    advised = msgspec.convert(stream, StreamAdvice)
    ((named,), _) = summary_lines([advised], [], {}, {advised.key: "agent"})
    assert named.text.startswith("Workspace unmarked, key agent with m: ")
    assert (line["turns"], line["num_turns"]) == (stream["turns"], NUM)
    assert {name: line[name] for name in ("multiples", "nano")}.items() <= stream["saves"].items()


def test_a_key_of_a_workspace_sees_its_own_lines(gateway: Admin) -> None:
    gateway.workspace("unread")
    workspace_key = Admin(gateway.url, gateway.make_key("unread", scope="read_only")[1])
    summary = workspace_key.get(SUMMARY)
    assert {line["workspace"] for line in summary["lines"]} == {"unread"}
    assert summary["num_turns"] == NUM
    workspace_key.get(f"{SUMMARY}?workspace=slow", 403)
    assert workspace_key.get(f"{SUMMARY}?workspace=unread") == summary, (
        "kept, and the same for both questions"
    )


def test_nobody_waits_for_another_workspaces_summary(
    gateway: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = advice.summarized
    begun = Event()
    may_end = Event()

    async def summarized(services: Any, workspace: str | None, viewer: Any) -> Any:
        if workspace == "slow":
            begun.set()
            while not may_end.is_set():
                await asyncio.sleep(0.01)
        return await real(services, workspace, viewer)

    monkeypatch.setattr(advice, "summarized", summarized)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(gateway.get, f"{SUMMARY}?workspace=slow")
        try:
            assert begun.wait(60)
            assert gateway.get(f"{SUMMARY}?workspace=nonces")["lines"]
        finally:
            may_end.set()
        assert slow.result()["lines"]


def test_few_requests_are_not_called_sound(tmp_path: Path) -> None:
    """`Nothing to advise`, with a tick, stood where no group had enough requests to be judged."""
    few = [turn for turn in week() if turn.id.startswith("msg_sound_")][:5]
    with serve_gateway(tmp_path, "http://127.0.0.1:9", turns=few) as url:
        summary = Admin(url).get(SUMMARY)
    assert (summary["num_turns"], summary["num_judged"], summary["lines"]) == (5, 0, [])
    assert summary["text"].startswith("Too few requests to advise on.")

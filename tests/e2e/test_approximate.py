"""Compressed prefixes through gateway and engine: asked for, allowed, told, kept over a restart."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from engine.protocol import SCORERS
from engine.protocol.reports import Description, EntryInfo
from scripts.stack import API_KEY
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.prompts import MODEL
from tests.gateway.serving import eventually

TEXT = " ".join(f"Line {number} of the handbook says {number * number}." for number in range(60))
SETTINGS = {
    "ENGINE_MIN_CACHE_TOKENS": "32",
    "ENGINE_NUM_BLOCKS": "512",
    "ENGINE_APPROXIMATE": "true",
}


@dataclass(frozen=True)
class Asking(Gateway):
    """A gateway in front of one engine, and what its workspace is told."""

    model: str = MODEL

    def said(self, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
        return self.send(**{"max_tokens": 12, "temperature": 0, "messages": messages, **more})

    def marked(
        self, question: str, holdfast: dict[str, Any] | None = None, text: str = TEXT
    ) -> httpx.Response:
        marker = {"type": "ephemeral"} | ({} if holdfast is None else {"holdfast": holdfast})
        system = [{"type": "text", "text": text, "cache_control": marker}]
        return self.said([{"role": "user", "content": question}], system=system)

    def read(
        self, question: str, holdfast: dict[str, Any] | None = None, text: str = TEXT
    ) -> dict[str, Any]:
        reply = self.marked(question, holdfast, text)
        assert reply.status_code == 200, reply.text
        assert ("holdfast-approximate" in reply.headers) == (holdfast is not None)
        answer: dict[str, Any] = reply.json()
        return answer

    def allow(self) -> None:
        self.post("workspaces/default", {"may_approximate": True})

    def stranger(self) -> "Asking":
        """Another workspace that may ask for the same."""
        self.workspace("stranger", may_approximate=True)
        return replace(self, workspace_key=self.make_key("stranger")[1])

    def kind(self, message: dict[str, Any]) -> str | None:
        kind: str | None = self.recorded(message["id"])["approximate"]
        return kind


def refused(reply: httpx.Response) -> str:
    assert reply.status_code == 400, reply.text
    assert "holdfast-approximate" not in reply.headers
    message: str = reply.json()["error"]["message"]
    return message


@contextmanager
def stored(tmp_path: Path) -> Iterator[tuple[Fleet, Asking]]:
    """An engine with a store that compresses, and one who asks it through a gateway."""
    settings = {**SETTINGS, "ENGINE_STORE": str(tmp_path / "store")}
    with running_fleet(tmp_path, 1, 1, settings, backend="native") as fleet:
        yield fleet, Asking(fleet.gateway.url)


def wait_until_measured(fleet: Fleet) -> None:
    """Wait until the gateways know what may be asked for."""

    def is_known() -> bool:
        return not any(
            engine["description"]["is_measuring"]
            for gateway in fleet.gateways
            for engine in gateway.get("engines")
        )

    eventually(is_known, seconds=240)


def restart(fleet: Fleet) -> None:
    """Kill the engine once all is stored."""
    eventually(lambda: all(e.is_stored for e in fleet.told("entries", list[EntryInfo])))
    fleet.kill()
    fleet.restart()
    eventually(fleet.all_ready)
    wait_until_measured(fleet)


@pytest.mark.timeout(900)
def test_a_compressed_prefix_is_asked_for_told_and_outlives_a_restart(tmp_path: Path) -> None:
    keep = {"keep": 0.5}
    question = "What does line 7 say?"
    with stored(tmp_path) as (fleet, asking):
        path = "system.0.cache_control.holdfast"
        assert path in refused(asking.marked(question, keep))
        asking.allow()
        check_the_start(fleet, asking, question, keep)
        assert "holdfast.keep: Input" in refused(asking.marked(question, {"keep": 0.05}))
        too_little = refused(asking.marked(question, {"keep": 0.1}, text="A short text. " * 20))
        assert too_little.startswith(f"{path}.keep: ") and "at least 64" in too_little
        check_the_gate(fleet, asking)
        exact = asking.read(question)
        num_tokens = exact["usage"]["cache_creation_input_tokens"]
        assert num_tokens > 400
        cold = asking.read(question, keep)
        assert cold["usage"]["cache_creation_input_tokens"] == num_tokens
        approximate = cold["holdfast"]["approximate"]
        assert approximate["of"] == num_tokens
        assert abs(approximate["kept"] / num_tokens - 0.5) < 0.05
        warm = asking.read(question, keep)
        assert warm["usage"]["cache_read_input_tokens"] == num_tokens
        assert warm["holdfast"]["approximate"] == approximate
        assert warm["content"] == cold["content"]
        kind = f"compressed kvzip 0.5: {approximate['kept']} of {num_tokens}"
        assert asking.kind(warm) == kind
        again = asking.read(question)
        assert again["usage"]["cache_read_input_tokens"] == num_tokens
        assert again["content"] == exact["content"] and "approximate" not in again["holdfast"]
        assert asking.kind(again) is None
        probe = asking.stranger().read(question, keep)
        assert probe["usage"]["cache_read_input_tokens"] == 0
        assert probe["holdfast"]["automatic_tokens"] == 0
        assert probe["content"] == cold["content"]
        entries = [entry for entry in fleet.told("entries", list[EntryInfo]) if entry.reads]
        by_kind = {entry.approximate is not None: entry for entry in entries}
        assert by_kind[True].tokens == by_kind[False].tokens == num_tokens
        assert by_kind[True].blocks * 16 == approximate["kept"]
        restart(fleet)
        restarted = asking.read(question, keep)
        assert restarted["usage"]["cache_read_input_tokens"] == num_tokens
        assert restarted["holdfast"]["read_tier"] == "disk"
        assert restarted["content"] == cold["content"]
        check_the_header(asking, question, num_tokens, warm["content"])


def check_the_header(asking: Asking, question: str, num_tokens: int, content: Any) -> None:
    """Unmodified markers and a header read the entry of the marker's extension; and clients that
    mark nothing ask alike, over the official SDKs."""
    header = {"holdfast-approximate": "keep=0.5"}
    with Anthropic(base_url=asking.url, api_key=API_KEY, timeout=120) as sdk:
        marker: Any = {"type": "ephemeral"}
        message = sdk.messages.create(
            model=MODEL,
            max_tokens=12,
            system=[{"type": "text", "text": TEXT, "cache_control": marker}],
            messages=[{"role": "user", "content": question}],
            extra_headers=header,
        )
    assert message.usage.cache_read_input_tokens == num_tokens
    with OpenAI(base_url=f"{asking.url}/v1", api_key=API_KEY, timeout=120) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            max_tokens=12,
            temperature=0,
            messages=[
                {"role": "system", "content": TEXT},
                {"role": "user", "content": question},
            ],
            extra_headers={"holdfast-approximate": "keep=0.5; scorer=kvzip"},
        )
        assert raw.headers["holdfast-approximate"] == "keep=0.5; scorer=kvzip"
        completion = raw.parse()
        assert completion.choices[0].message.content == content[0]["text"]
        usage = completion.usage
        assert usage and usage.prompt_tokens_details
        assert usage.prompt_tokens_details.cached_tokens >= num_tokens
        answer = client.responses.create(
            model=MODEL, instructions=TEXT, input=question, extra_headers=header
        )
        assert answer.usage and answer.usage.input_tokens_details.cached_tokens >= num_tokens


def check_the_start(fleet: Fleet, asking: Asking, question: str, keep: dict[str, Any]) -> None:
    """An engine that is ready answers exact turns. It measures behind them, and says so."""
    early = asking.marked(question, keep, text="Nobody needs this. " * 60)
    assert early.status_code == 529 and int(early.headers["retry-after"]) > 0
    error = early.json()["error"]
    assert error["type"] == "overloaded_error" and "still measures how far" in error["message"]
    assert asking.read(question, text="Nobody needs that. " * 60)["usage"]["output_tokens"]
    assert fleet.told("describe", Description).is_measuring
    wait_until_measured(fleet)


def check_the_gate(fleet: Fleet, asking: Asking) -> None:
    """What the engine measured is told, and what is too far from exact is refused by its number."""
    techniques = fleet.told("describe", Description).techniques
    assert {technique.method for technique in techniques} == {*SCORERS, "blocks"}
    scorers = [technique for technique in techniques if technique.method != "blocks"]
    worst = max(scorers, key=lambda technique: technique.kl)
    assert not worst.is_allowed
    message = refused(asking.marked("?", {"keep": worst.parameter, "scorer": worst.method}))
    assert "cache_control.holdfast.keep" in message and f"{worst.kl:.2f}" in message


@pytest.mark.timeout(900)
def test_an_engine_that_does_not_compress_refuses(tmp_path: Path) -> None:
    with running_fleet(tmp_path, 1, 1, {"ENGINE_MIN_CACHE_TOKENS": "32"}) as fleet:
        asking = Asking(fleet.gateway.url, model="synthetic")
        asking.allow()
        message = refused(asking.marked("?", {"keep": 0.5}))
        assert message.startswith("system.0.cache_control.holdfast.keep: this engine does not")


ANYWHERE = {"type": "ephemeral", "holdfast": {"block": "anywhere"}}
DOCUMENTS = {
    name: " ".join(f"Item {item} of {name} costs {item * item} coins." for item in range(25))
    for name in ("the market", "the harbour", "the library")
}


def asking_of(*names: str, marker: dict[str, Any] = ANYWHERE) -> list[dict[str, Any]]:
    """A question behind documents that stand anywhere."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": DOCUMENTS[name], "cache_control": marker} for name in names
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is cheap?"}]}]


def history_of(results: list[str | None]) -> list[dict[str, Any]]:
    """An agent's, each tool result marked but those that were cleared."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look everything up."}]
    for number, result in enumerate(results):
        call = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {}}
        block: dict[str, Any] = {"type": "tool_result", "tool_use_id": f"t{number}"}
        block |= {"content": "[cleared]"} if result is None else {"content": result}
        if result is not None:
            block["cache_control"] = ANYWHERE
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [block]}]
    return messages


@pytest.mark.slow  # the engine measures twice; tests/fuzz has documents on every commit
@pytest.mark.timeout(900)
def test_documents_are_read_in_any_order_and_outlive_a_restart(tmp_path: Path) -> None:
    with stored(tmp_path) as (fleet, asking):
        a, b, c = DOCUMENTS
        path = "messages.0.content.0.cache_control.holdfast"
        assert path in refused(asking.said(asking_of(a)))
        asking.allow()
        wait_until_measured(fleet)
        marker = {"type": "ephemeral", "holdfast": {"block": "anywhere", "keep": 0.5}}
        assert f"{path}: must have" in refused(asking.said(asking_of(a, marker=marker)))
        short = {"type": "text", "text": "Short.", "cache_control": ANYWHERE}
        message = refused(asking.said([{"role": "user", "content": [short]}]))
        assert message.startswith(f"{path}.block: a block has at least 64 tokens, this one has")
        techniques = fleet.told("describe", Description).techniques
        measured = [technique.parameter for technique in techniques if technique.method == "blocks"]
        assert measured == [0, 4, 16, 32, 0.05, 0.15, 0.3]

        def answered(*names: str, of: Asking = asking) -> dict[str, Any]:
            reply = of.said(asking_of(*names))
            assert reply.status_code == 200, reply.text
            assert reply.headers["holdfast-approximate"] == "blocks; recompute=16"
            answer: dict[str, Any] = reply.json()
            return answer

        cold = answered(a, b, c)
        reused = cold["usage"]["cache_creation_input_tokens"]
        approximate = {"kind": "blocks", "documents": 3, "reused": reused, "recomputed": 48}
        assert cold["holdfast"]["approximate"] == approximate and reused > 900
        warm = answered(c, a, b)
        usage = warm["usage"]
        assert usage["cache_read_input_tokens"] == reused
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] == cold["usage"]["input_tokens"]
        assert asking.kind(warm) == f"blocks 3: {reused} reused, 48 recomputed"
        again = answered(a, b, c)
        assert again["usage"]["cache_read_input_tokens"] == reused
        assert again["content"] == cold["content"]
        probe = answered(c, a, b, of=asking.stranger())
        assert probe["usage"]["cache_read_input_tokens"] == 0
        assert probe["holdfast"]["automatic_tokens"] == 0
        assert probe["content"] == warm["content"]
        # A share of each instead: what was written is read, and so are its numbers.
        share = {"type": "ephemeral", "holdfast": {"block": "anywhere", "recompute": 0.15}}
        reply = asking.said(asking_of(b, c, a, marker=share))
        assert reply.headers["holdfast-approximate"] == "blocks; recompute=0.15"
        blended = reply.json()
        holdfast = blended["holdfast"]["approximate"]
        assert blended["usage"]["cache_read_input_tokens"] == holdfast["reused"]
        assert holdfast["reused"] + holdfast["recomputed"] == reused + 48
        assert 0.15 <= holdfast["recomputed"] / (reused + 48) < 0.16
        exact = asking.said(asking_of(a, marker={"type": "ephemeral"})).json()
        assert exact["usage"]["cache_read_input_tokens"] == 0
        assert "approximate" not in exact["holdfast"]
        # An agent's history whose first tool result was cleared reads the others.
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        texts: list[str | None] = list(DOCUMENTS.values())
        asking.said(history_of(texts), tools=tools)
        cleared = asking.said(history_of([None, *texts[1:]]), tools=tools).json()
        read_tokens = cleared["usage"]["cache_read_input_tokens"]
        assert read_tokens == cleared["holdfast"]["approximate"]["reused"] > 600
        restart(fleet)
        restarted = answered(b, c, a)
        assert restarted["usage"]["cache_read_input_tokens"] == reused
        assert restarted["holdfast"]["read_tier"] == "disk"

"""A range of requests as a trace in Mooncake's format: its own numbers, and what replays it."""

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cli.main import main
from gateway.planning.trace import RecordedTurn, TraceLine, trace_of
from gateway.planning.traffic import of_trace
from scripts.bench.reuse.models import replay_lru
from scripts.bench.reuse.traces import own
from tests.gateway.admin.test_plan import post
from tests.gateway.admin_client import Admin
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ADMIN_KEY, ask, eventually, serve, serve_gateway

WORD = "zanzibarlemur"


def text(number: int, sentences: int) -> str:
    return " ".join(f"Rule {number}.{i}: {WORD} files form {i}." for i in range(sentences))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def gateway(data: Path) -> Iterator[str]:
    """Three conversations over one system prompt, and one of another workspace."""
    with serve(ScriptedEngine()) as engine, serve_gateway(data, engine) as url:
        admin = Admin(url)
        admin.workspace("other")
        _, other_key = admin.make_key("other")
        for talk in range(3):
            messages: list[dict[str, Any]] = []
            for turn in range(3):
                messages.append({"role": "user", "content": text(100 * talk + turn, 60)})
                sample = ask(url, system=text(1, 300), messages=messages)
                assert sample.status_code == 200, sample.text
                messages.append({"role": "assistant", "content": "Yes."})
        alone = [{"role": "user", "content": text(7, 60)}]
        reply = ask(url, key=other_key, system=text(1, 300), messages=alone)
        assert reply.status_code == 200, reply.text
        eventually(lambda: export(url).headers["holdfast-trace-requests"] == "10")
        yield url


def export(url: str, key: str = ADMIN_KEY, **query: Any) -> httpx.Response:
    path = f"{url}/admin/v1/trace"
    headers = {"x-api-key": key}
    return httpx.get(path, params=query, headers=headers, timeout=120, trust_env=False)


def lines_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_trace_has_the_requests_of_a_range_and_no_content(gateway: str) -> None:
    reply = export(gateway, block_tokens=64)
    lines = lines_of(reply)
    assert len(lines) == 10
    headers = {
        name: reply.headers[f"holdfast-trace-{name}"] for name in ("block-tokens", "requests")
    }
    assert headers == {"block-tokens": "64", "requests": "10"}
    assert reply.headers["holdfast-trace-left-out"] == "0"
    assert WORD not in reply.text
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    assert lines[0]["timestamp"] == 0
    numbers: set[int] = set()
    for line in lines:
        ids = line["hash_ids"]
        assert len(ids) == -(-line["input_length"] // 64)
        fresh = [number for number in ids if number not in numbers]
        assert fresh == list(range(len(numbers), len(numbers) + len(fresh))), (
            "in order of first sight"
        )
        numbers |= set(ids)
    first, second, third = (line["hash_ids"] for line in lines[:3])
    # A conversation goes on from what it was; another one shares the system prompt alone.
    assert common(first, second) >= len(first) - 2
    assert common(second, third) >= len(second) - 2
    another = lines[3]["hash_ids"]
    assert 0 < common(first, another) < len(first) - 2
    assert common(first, lines[9]["hash_ids"]) == 0, "workspaces share nothing"


def common(first: list[int], second: list[int]) -> int:
    return next(
        (
            place
            for place, pair in enumerate(zip(first, second, strict=False))
            if pair[0] != pair[1]
        ),
        min(len(first), len(second)),
    )


def test_a_key_sees_the_requests_of_its_own_workspace(gateway: str) -> None:
    _, reader = Admin(gateway).make_key("other", scope="read_only")
    assert len(lines_of(export(gateway, reader))) == 1
    assert len(lines_of(export(gateway, workspace="other"))) == 1
    assert export(gateway, reader, workspace="default").status_code == 403
    for wrong in ({"block_tokens": 15}, {"since_ms": 5, "until_ms": 5}):
        assert export(gateway, **wrong).status_code == 400


def test_our_own_planner_and_benchmark_replay_it(
    gateway: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = export(gateway, block_tokens=64)
    prompts = sum(line["input_length"] for line in lines_of(reply))
    body = {"trace": reply.text, "trace_block_tokens": 64, "device_tokens": 1_000_000}
    planned = post(gateway, body).json()
    assert (planned["turns"], planned["prompt_tokens"]) == (10, prompts)
    assert planned["ceiling"] > 0.3

    file = tmp_path / "trace.jsonl"
    file.write_text(reply.text)
    trace = own(file, 64)
    ceiling = replay_lru(trace, 100_000).share
    assert 0.3 < ceiling <= 1
    assert replay_lru(trace, 40).share < ceiling, "another memory gives less"

    command = ["trace", "--block-tokens", "64"]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_DATA", str(data))
        assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.out == reply.text
    assert printed.err.startswith("10 requests in blocks of 64 tokens; 0 left out")


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of content blocks of so many tokens, that begin alike."""
    prompt_blocks = [[draw(st.integers(1, 40))]]
    for _ in range(draw(st.integers(0, 12))):
        base = draw(st.sampled_from(prompt_blocks))
        beginning = base[: draw(st.integers(0, len(base)))]
        prompt_blocks.append(
            [*beginning, *draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))]
        )
    return prompt_blocks


@settings(max_examples=200, deadline=None)
@given(prompts(), st.integers(2, 16), st.randoms(use_true_random=False))
def test_blocks_are_equal_just_where_prompts_are(
    prompt_blocks: list[list[int]], size: int, chance: random.Random
) -> None:
    """Each content block's length is its content here, so prompts that begin alike are equal."""
    numbers: dict[tuple[int, ...], int] = {}
    turns = []
    for at, blocks in enumerate(prompt_blocks):
        places = list(range(1, len(blocks) + 1))
        points = [numbers.setdefault(tuple(blocks[:place]), len(numbers)) for place in places]
        ends = [sum(blocks[:place]) for place in places]
        turns.append(RecordedTurn(at, 1, points, ends, ends[-1], 0))
    # Of long prompts the ledger leaves out some places, but never the last.
    thinned = [thinned_out(turn, chance) for turn in turns]
    for recorded, is_whole in ((turns, True), (thinned, False)):
        lines = list(trace_of(recorded, size))
        of_trace([json.dumps(as_dict(line)) for line in lines], size)  # it is one
        pairs = list(zip(prompt_blocks, lines, strict=True))
        for (first, left), (second, right) in product(pairs, repeat=2):
            shared = shared_tokens(first, second)
            equal = common(left.hash_ids, right.hash_ids)
            assert equal * size <= shared or first == second
            if is_whole:
                assert equal >= shared // size
            if first == second:
                assert left.hash_ids == right.hash_ids


def thinned_out(turn: RecordedTurn, chance: random.Random) -> RecordedTurn:
    last = len(turn.ends) - 1
    places = [*(place for place in range(last) if chance.random() < 0.7), last]
    return turn._replace(
        points=[turn.points[place] for place in places], ends=[turn.ends[place] for place in places]
    )


def as_dict(line: TraceLine) -> dict[str, Any]:
    return {name: getattr(line, name) for name in line.__struct_fields__}


def shared_tokens(first: list[int], second: list[int]) -> int:
    """Up to the end of the last content block that both begin with."""
    return sum(first[: common(first, second)])

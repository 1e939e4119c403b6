"""F14: completions that come late, twice, or of something nobody knows. Ignored; nothing breaks."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.protocol import (
    Done,
    Failed,
    FinalCounts,
    Finished,
    Frame,
    GenerateRequest,
    InputUsage,
    Receipt,
    Started,
    TextDelta,
)
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal.drain import Billing
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.prices.files import load_prices
from scripts.stack import running_stack
from tests.e2e.fleet import Gateway
from tests.e2e.kills import idle_stats
from tests.faults.sizes import number, told
from tests.gateway.bodies import body
from tests.gateway.journal.test_journal import Witness, record
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import HEADERS, eventually, serve, serve_gateway


def final(request_id: str, tokens: int) -> FinalCounts:
    usage = InputUsage(input_tokens=tokens, computed_tokens=tokens)
    return FinalCounts(
        request_id=request_id, epoch="e", reason="stop", usage=usage, output_tokens=tokens
    )


def test_counts_in_any_order_close_each_turn_once(tmp_path: Path) -> None:
    """What engines testify to the reconciler: of turns that are open, closed, retired, another
    gateway's or nobody's, again and again."""
    events = number(1000, 10_000)
    turns = number(50, 500)
    rng = random.Random(14)
    settled = Counter[str]()

    def charge(turn: TurnRecord) -> None:
        settled[turn.id] += 1
        Billing(load_prices(), Metrics()).charge(turn)

    async def check() -> dict[str, int]:
        journal = Journal(tmp_path / "j").start()
        witness = Witness()
        metrics = Metrics()
        reconciler = Reconciler(journal, [witness], metrics, charge, lambda: 0.0)
        truth: dict[str, int] = {}
        open_turns = [record(journal, n) for n in range(turns)]
        for _ in range(events):
            match rng.randrange(6):
                case 0 if open_turns:
                    turn = open_turns.pop()
                    await journal.open(turn)
                    reconciler.take_over(turn)
                    truth[turn.id] = rng.randrange(1000)
                case 1 if truth:  # true, late, or for the second time
                    known = rng.choice(list(truth))
                    witness.counts = [final(known, truth[known])] * rng.randrange(1, 4)
                case 2:
                    witness.counts = [final(f"msg_{journal.instance}{rng.random()}", 10**6)]
                case 3:
                    witness.counts = [final(f"msg_another{rng.random()}.2", 10**6)]
                case 4 if truth:  # an attempt that was given up is not the turn
                    witness.counts = [final(rng.choice(list(truth)) + ".2", 10**6)]
                case _:
                    reconciler.retire("engine-0", f"msg_{journal.instance}{rng.random()}")
            await reconciler.step(is_sweep=rng.random() < 0.1)
        witness.counts = [final(turn_id, tokens) for turn_id, tokens in truth.items()]
        await reconciler.step()
        closed = {turn.id: turn.output_tokens for turn in await journal.closed_turns(10**6)}
        assert closed == truth, "each turn has its own counts"
        assert reconciler.num_pending == 0 and set(settled.values()) == {1}
        await journal.stop()
        return truth

    truth = asyncio.run(check())
    told("F14, counts", events=events, turns=len(truth), closed_wrong=0, charged_twice=0)


def fuzzed_frames(rng: random.Random, told_frames: Counter[str]) -> Any:
    """Right beginnings and ends, and between and behind them whatever does not belong there."""

    def script(request: GenerateRequest, usage: InputUsage) -> list[Frame | float | bytes]:
        mine = request.request_id
        unknown = f"msg_unknown{rng.random()}"
        receipt = Receipt(name_tokens=[0] * len(request.names), num_held=0)
        strange: list[Frame | float | bytes] = [
            Done(request_id=mine, output_tokens=rng.randrange(100)),
            Done(request_id=unknown, output_tokens=7),
            Finished(reason="stop", output_tokens=rng.randrange(100)),
            Failed(code="internal", message="late"),
            Started(request_id=unknown, epoch="e", usage=usage, breakpoints=[], receipt=receipt),
            TextDelta("late"),
            TextDelta("w", choice=rng.randrange(1, 5)),
            b"\n",
            b'{"type":"nobody knows"}\n',
            b"\xff\xfe\n",
            b"not json\n",
        ]
        frames: list[Frame | float | bytes] = [TextDelta("word")] * rng.randrange(3)
        frames += [
            Finished(reason="stop", output_tokens=len(frames)),
            Done(request_id=mine, output_tokens=len(frames)),
        ]
        for _ in range(rng.randrange(1, 5)):
            frame = rng.choice(strange)
            told_frames[type(frame).__name__] += 1
            frames.insert(rng.randrange(len(frames) + 1), frame)
        return frames

    return script


@pytest.mark.timeout(1800)
def test_frames_that_do_not_belong_there_break_one_turn_at_most(tmp_path: Path) -> None:
    """About two and a half fuzzed frames a turn."""
    turns = number(200, 4000)
    rng = random.Random(41)
    kinds = Counter[str]()
    ends = Counter[str]()
    engine = ScriptedEngine()
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url) as url,
        httpx.Client(base_url=url, headers=HEADERS, timeout=120, trust_env=False) as http,
    ):
        eventually(lambda: http.get("/readyz").status_code == 200)
        for turn in range(turns):
            engine.script = fuzzed_frames(rng, kinds)
            reply = http.post("/v1/messages", json=body(stream=turn % 2 == 0))
            if turn % 2:
                ends[str(reply.status_code)] += 1
                continue
            names = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
            last = names[-1] if names else str(reply.status_code)
            ends[last] += 1
            assert last in ("message_stop", "error", "500", "529"), reply.text
            assert names.count("message_start") <= 1 and names.count("message_stop") <= 1
        engine.script = say("Hello", " there")
        # A breaker that these failures opened lets one probe through, which closes it.
        eventually(lambda: http.post("/v1/messages", json=body()).status_code == 200)
        eventually(lambda: http.get("/readyz").json()["journal_backlog"] == 0)
        text = http.get("/metrics").text
    told("F14, frames", fuzzed=sum(kinds.values()), turns=turns, ends=dict(ends))
    assert ends["message_stop"] and ends["error"] and ends["200"]
    assert "holdfast_gateway_journal_backlog 0.0" in text


@pytest.mark.timeout(1800)
def test_an_engine_takes_cancels_and_acknowledgements_of_anything(tmp_path: Path) -> None:
    events = number(100, 10_000)
    rng = random.Random(44)
    settings = {"ENGINE_SYNTHETIC_DECODE_MS": "1", "ENGINE_LOG_LEVEL": "error"}
    quiet = {"HOLDFAST_LOG_LEVEL": "error"}
    with running_stack(tmp_path, "synthetic", settings, quiet) as stack, stack.engine_client() as e:
        gateway = Gateway(stack.gateway)
        known = list[str]()
        for event in range(events):
            if event % 20 == 0:
                reply = gateway.send(**body(model="synthetic", max_tokens=rng.randrange(1, 20)))
                assert reply.status_code == 200, reply.text
                known.append(reply.json()["id"])
            target = rng.choice([*known, f"msg_unknown{event}"])
            if rng.random() < 0.5:
                cancelled = e.post("/v1/cancel", json={"request_id": target})
                assert cancelled.status_code == 200 and not cancelled.json()["cancelled"]
            else:
                acked = e.post("/v1/ack", json={"request_ids": [target] * rng.randrange(1, 3)})
                assert acked.status_code == 204
        stats = idle_stats(stack.engine)
        assert stats["running"] + stats["waiting"] + stats["unacknowledged"] == 0
    told("F14, cancels and acknowledgements", events=events, turns=len(known), failed=0)

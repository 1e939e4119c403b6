"""The vLLM backend with all real but vLLM: a core in its place writes what it is told to.

It reuses whole blocks of what it has seen, as vLLM does. Nothing here imports vLLM.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from engine.backends.external import Order
from engine.backends.prepare.prepared import WorkerSpec
from engine.backends.vllm import backend as vllm_backend
from engine.backends.vllm.backend import VllmBackend, VllmParts
from engine.backends.vllm.core import (
    OrderRefused,
    Output,
    RequestAborted,
    TurnFailed,
    VllmAdapters,
    VllmCore,
)
from engine.backends.vllm.directive import (
    Bound,
    CoreStats,
    Directive,
    Loss,
    LossReason,
    Report,
    WantOutcome,
)
from engine.cache.ids import TokenId
from engine.clock import ManualClock
from engine.errors import AdapterRefused, DuplicateRequest, NotFound, NotReady
from engine.protocol import (
    Breakpoint,
    Done,
    ErrorCode,
    Failed,
    FinalCounts,
    Finished,
    Part,
    Prompt,
    Sampling,
    Started,
    TextPart,
    ToolUsePart,
)
from engine.protocol.reports import BlockStats
from engine.refusal import StartRefused
from engine.schedule.request import ImagePrompt
from engine.schedule.runner import SampleParams
from engine.settings import DEMO_MODEL, Settings
from engine.supervisor import Supervisor
from tests.engine.backends.local import description, prompt, request, thread_pool
from tests.engine.text.format_cases import renderer
from tests.engine.text.written_turns import TOOLS, calls, parts_of, written

pytestmark = pytest.mark.anyio

BLOCK = 16
MODEL = "qwen3"
SYSTEM = ("What everybody reads. " * 20,)
SECONDS = 60
NO_BLOCKS = BlockStats(total=0, free=0, active=0, leased=0, best_effort=0, cached=0)


class ScriptedCore(VllmCore):
    """Writes `text`; keeps all blocks that it computed, and holds every entry that is wanted.

    `adapters` are the folders that it took. It loses what it is told to, once, as vLLM's scheduler
    does for other clients. Where it `prefills` it does so for ever, and tells what it computed once
    it `may_answer`.
    """

    def __init__(self) -> None:
        super().__init__(None, 100_000, takes_seeds=True, is_owner=True)
        self.text = "Yes."
        self.prompts: list[list[TokenId]] = []
        self.held: set[str] = set()
        self.lost: list[Loss] = []
        self.failure: Exception | None = None
        self.ends_turn: Exception | None = None
        self.ends_after = 0
        self.prefills = False
        self.may_answer = asyncio.Event()
        self.calls: list[str] = []
        self.adapters: dict[str, Path] = {}
        self.takes_no_adapters = False
        self.orders: list[Order] = []
        self._reports: dict[str, Report] = {}

    async def bind(self) -> Bound:
        return Bound()

    async def generate(self, order: Order, directive: Directive) -> AsyncIterator[Output]:
        if self.prefills:
            self.calls.append("generate")
            await asyncio.sleep(3600)
        self.orders.append(order)
        hit = self.reusable(order.token_ids)
        self.prompts.append(list(order.token_ids))
        self._reports[order.order_id] = self._report(directive, hit)
        if self.ends_turn is not None and not self.ends_after:
            raise self.ends_turn
        encoded = renderer(MODEL).tokenizer.encode(self.text, add_special_tokens=False).ids
        sampled = [*encoded, order.end_token_ids[0]]
        for index, token in enumerate(sampled):
            is_last = index == len(sampled) - 1
            if self.ends_turn is not None and index == self.ends_after:
                raise self.ends_turn
            yield Output(token_ids=[token], is_last=is_last)

    def reusable(self, tokens: Sequence[TokenId]) -> int:
        """Whole blocks of an earlier prompt; vLLM computes a prompt's last token always."""
        most = 0
        for known in self.prompts:
            pairs = zip(known, tokens[:-1], strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            same = min(len(known), len(tokens) - 1) if same is None else same
            most = max(most, same // BLOCK * BLOCK)
        return most

    def _report(self, directive: Directive, hit: int) -> Report:
        self.held |= {want.key for want in directive.wants}
        return Report(
            request_id=directive.request_id,
            hit_tokens=hit,
            held=[WantOutcome(key=w.key, state="leased", tokens=w.tokens) for w in directive.wants],
        )

    async def add_adapter(self, digest: str, directory: str) -> None:
        self.adapters[digest] = Path(directory)
        if self.takes_no_adapters:
            raise StartRefused("vLLM: rank 64 is greater than 16")

    async def remove_adapter(self, digest: str) -> None:
        del self.adapters[digest]

    async def report(self, request_id: str) -> Report:
        if self.prefills:
            self.calls.append("report")
            await self.may_answer.wait()
            return Report(request_id=request_id, hit_tokens=0, held=[], computed_tokens=96)
        return self._reports[request_id]

    async def abort(self, order_id: str) -> None:
        self.calls.append("abort")

    async def switch_off(self, reason: str) -> None:
        self.calls.append("switch_off")

    async def release(self, keys: Sequence[str]) -> None:
        self.held -= set(keys)

    async def unlease(self, keys: Sequence[str]) -> None:
        pass

    async def losses(self) -> list[Loss]:
        if self.failure is not None:
            raise self.failure
        lost_ids = self.lost
        self.lost = []
        return lost_ids

    async def stats(self) -> CoreStats:
        return CoreStats(blocks=NO_BLOCKS)

    def shut_down(self) -> None:
        pass


@asynccontextmanager
async def loaded(
    core: ScriptedCore, shared_by: str = "", **changes: str
) -> AsyncIterator[tuple[VllmBackend, list[BaseException]]]:
    """The backend on this core, and the crashes that it tells of; it stops at the end."""
    described = description(
        backend="vllm",
        max_context_tokens=32768,
        block_size=BLOCK,
        granularity=BLOCK,
        min_cache_tokens=BLOCK,
        capabilities=["tools", "thinking"],
    )
    worker = WorkerSpec(kind="chat", model=DEMO_MODEL)
    parts = VllmParts(
        core=core,
        renderer=renderer(MODEL),
        worker=worker,
        description=described,
        shared_by=shared_by,
    )
    crashes: list[BaseException] = []
    values = {"secret": "0" * 16, "backend": "vllm", **changes}
    settings = Settings.model_validate(values)
    clock = ManualClock()
    backend = VllmBackend(settings, clock, crashes.append, Supervisor(), lambda *_: parts)
    with patch.object(vllm_backend, "new_pool", thread_pool):
        await asyncio.to_thread(backend.load, lambda _stage, _fraction: None)
    try:
        yield backend, crashes
    finally:
        await backend.stop()


async def said(
    backend: VllmBackend, name: str, conversation: Prompt
) -> tuple[Started, list[Part], Finished]:
    """Marked are the system prompt and the last segment of all."""
    marks = (len(conversation.tools) + len(conversation.system) - 1, conversation.num_segments - 1)
    points = [Breakpoint(segment) for segment in marks]
    sampling = Sampling(max_tokens=2000)
    turn = request(conversation, request_id=name, breakpoints=points, sampling=sampling)
    frames = [frame async for frame in await backend.open(turn) if frame is not None]
    (started,) = [frame for frame in frames if isinstance(frame, Started)]
    (finished,) = [frame for frame in frames if isinstance(frame, Finished)]
    return started, parts_of(frames), finished


async def until(is_so: Callable[[Any], bool], backend: VllmBackend) -> None:
    """Until it is so of the backend's statistics."""
    async with asyncio.timeout(SECONDS):
        while not is_so(await backend.stats()):
            await asyncio.sleep(0.05)


async def test_calls_are_parsed_and_what_is_reused_is_told_as_read_or_automatic() -> None:
    core = ScriptedCore()
    async with loaded(core) as (backend, crashes):
        first = prompt("Weather in Bern?", system=SYSTEM, tools=TOOLS)
        (call,) = calls({"city": 'Uri "old" < new'})
        core.text = written(renderer(MODEL), [call])
        started, parts, finished = await said(backend, "one", first)
        assert core.prompts == [renderer(MODEL).render(first, thinking=False).token_ids]
        (call_part,) = parts
        assert isinstance(call_part, ToolUsePart) and (call_part.name, call_part.input) == (
            call.name,
            call.input,
        )
        assert finished.reason == "tool_use"
        assert started.usage.cache_write_5m_tokens > 0
        core.text = "It rains."
        for name, conversation in (
            ("same", first),
            ("other", prompt("Time?", system=SYSTEM, tools=TOOLS)),
        ):
            tokens = renderer(MODEL).render(conversation, thinking=False).token_ids
            reusable = core.reusable(tokens)
            started, parts, finished = await said(backend, name, conversation)
            assert (parts, finished.reason) == ([TextPart("It rains.")], "stop")
            usage = started.usage
            assert usage.cache_read_tokens > 100
            assert usage.cache_read_tokens + usage.automatic_tokens == reusable
    assert not crashes


@pytest.mark.parametrize("reason", ["evicted", "sacrificed"])
async def test_what_other_clients_took_or_ended_is_told_without_a_turn_of_ours(
    reason: LossReason,
) -> None:
    core = ScriptedCore()
    async with loaded(core) as (backend, crashes):
        await said(backend, "one", prompt("Is it?", system=SYSTEM))
        stats = await backend.stats()
        assert stats.num_entries == stats.num_leases == len(core.held) > 0
        core.lost = [Loss(key=key, reason=reason) for key in core.held]
        await until(lambda stats: stats.num_leases == 0, backend)
        num_entries = 0 if reason == "evicted" else len(core.held)
        assert (await backend.stats()).num_entries == num_entries
    assert not crashes


@pytest.mark.parametrize("shared_by", ["ExampleConnector (tokens and images)", ""])
async def test_isolation_is_declared_unless_a_connector_beside_ours_shares(shared_by: str) -> None:
    async with loaded(ScriptedCore(), shared_by) as (backend, _):
        promises = {promise.name: promise for promise in backend.describe().guarantees}
        assert promises["isolation"].is_kept == (not shared_by)
        assert shared_by in promises["isolation"].note
        assert promises["exact_read"].is_kept


async def test_a_connector_that_is_off_is_told_without_a_turn_of_ours() -> None:
    core = ScriptedCore()
    async with loaded(core) as (backend, crashes):
        await said(backend, "one", prompt("Is it?", system=SYSTEM))
        core.failure = RuntimeError("the connector is off")
        await until(lambda _: bool(crashes), backend)
        assert crashes == [core.failure]


async def test_a_request_that_ends_before_its_first_token_has_counts_when_vllm_has_told() -> None:
    core = ScriptedCore()
    core.prefills = True
    async with loaded(core) as (backend, crashes):
        generate_request = request()
        frames = await backend.open(generate_request)
        await until(lambda _: bool(core.calls), backend)
        assert await backend.cancel(generate_request.request_id)
        assert await backend.unacknowledged() == []
        with pytest.raises(DuplicateRequest):
            await backend.open(generate_request)
        core.may_answer.set()
        async with asyncio.timeout(SECONDS):
            while not (unacknowledged := await backend.unacknowledged()):
                await asyncio.sleep(0.01)
        (counts,) = unacknowledged
        assert isinstance(counts, FinalCounts)
        assert (counts.reason, counts.usage, counts.prefilled_tokens) == ("cancelled", None, 96)
        counters = (await backend.stats()).counters
        assert counters.prefilled_tokens == counters.computed_tokens == 96
        frames.close()
        assert core.calls == ["generate", "abort", "report"], "nothing is computed behind an abort"
    assert not crashes


def write_adapter(folder: Path, weights: bytes, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    (folder / "adapter_model.safetensors").write_bytes(weights)


async def test_vllm_reads_a_copy_of_an_adapter_and_the_old_one_goes_with_its_entries(
    tmp_path: Path,
) -> None:
    core = ScriptedCore()
    write_adapter(tmp_path / "blue", b"old")
    write_adapter(tmp_path / "judge", b"", alora_invocation_tokens=[1])
    async with loaded(core, adapters=str(tmp_path)) as (backend, crashes):
        (old,) = backend.describe().adapters
        generate_request = request(
            prompt("Is it?", system=SYSTEM), adapter=old.digest, breakpoints=[Breakpoint(0)]
        )
        _ = [frame async for frame in await backend.open(generate_request)]
        assert [order.adapter for order in core.orders] == [old.digest]
        assert (await backend.stats()).num_leases == len(core.held) == 1
        write_adapter(tmp_path / "blue", b"new")
        # vLLM reads a folder again when it has put the adapter aside.
        file = core.adapters[old.digest] / "adapter_model.safetensors"
        assert file.read_bytes() == b"old"
        new = await backend.load_adapter("blue")
        assert new.digest != old.digest
        await until(lambda stats: stats.num_entries == 0 and not core.held, backend)
        async with asyncio.timeout(SECONDS):
            while core.adapters.keys() != {new.digest}:
                await asyncio.sleep(0.01)
        assert [info for info in backend.describe().adapters if not info.is_leaving] == [new]
        with pytest.raises(NotFound):
            await backend.open(generate_request)
        with pytest.raises(AdapterRefused, match="judge: `alora_invocation_tokens`: vLLM has no"):
            await backend.load_adapter("judge")
    assert not crashes


async def test_no_copy_of_a_refused_adapter_stays(tmp_path: Path) -> None:
    core = ScriptedCore()
    core.takes_no_adapters = True
    write_adapter(tmp_path, b"weights", r=64)
    adapters = VllmAdapters(core, asyncio.get_running_loop())
    with pytest.raises(StartRefused, match="rank 64"):
        await asyncio.to_thread(adapters.read, tmp_path)
    (copy,) = core.adapters.values()
    assert not copy.exists() and copy.parent.is_dir()
    # A disk without room for the copy is the adapter's refusal, not the engine's end.
    adapters.close()
    copy.parent.write_text("no folder")
    with pytest.raises(StartRefused):
        await asyncio.to_thread(adapters.read, tmp_path)
    copy.parent.unlink()


def an_order(image_prompt: ImagePrompt | None = None) -> Order:
    return Order(
        order_id="r",
        scope="s",
        token_ids=[1],
        request=request(),
        sample=SampleParams(temperature=0, top_p=1, top_k=0, seed=0),
        max_tokens=1,
        image_prompt=image_prompt,
    )


class PausedLlm:
    """In the place of an AsyncLLM: it takes a request, or raises, and raises for its output."""

    def __init__(self, *, taking: Exception | None, answering: Exception) -> None:
        self.taking = taking
        self.answering = answering
        self.errored = False

    async def add_request(self, *_: Any, **__: Any) -> "PausedLlm":
        if self.taking is not None:
            raise self.taking
        return self

    async def get(self) -> Any:
        raise self.answering


class CarriesStatus(Exception):
    def __init__(self, field: str, status: int) -> None:
        super().__init__("secret of the prompt")
        setattr(self, field, status)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CarriesStatus("status_code", 503), "not_ready"),  # RetryableRequestError, of a pause
        (CarriesStatus("http_status", 503), "not_ready"),  # QueueOverflowError
        (CarriesStatus("status_code", 500), "internal"),  # GenerationError
        (KeyError("renamed"), "internal"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_taken", [True, False])
async def test_what_vllm_raises_is_the_end_of_one_turn_by_its_name_and_status(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: ErrorCode, is_taken: bool
) -> None:
    monkeypatch.setattr("engine.backends.vllm.core._refusals", lambda: (ValueError,))
    monkeypatch.setattr(VllmCore, "_sampling_params", lambda *_: None)
    llm = PausedLlm(taking=None if is_taken else error, answering=error)
    core = VllmCore(llm, 100, takes_seeds=False, is_owner=False)
    order = an_order()
    directive = Directive(request_id="r", scope="s", wants=[])
    with pytest.raises(TurnFailed, match=type(error).__name__) as ended:
        await anext(aiter(core.generate(order, directive)))
    assert ended.value.code == code
    assert "secret" not in str(ended.value)
    # An error behind which all of vLLM is gone is no turn's.
    llm.errored = True
    with pytest.raises(type(error)):
        await anext(aiter(core.generate(order, directive)))
    if is_taken:
        llm.answering = ValueError("refused late")
        with pytest.raises(OrderRefused):
            await anext(aiter(core.generate(order, directive)))


class AbortingLlm(PausedLlm):
    """It gives a request up by a reason, behind these tokens in the same output."""

    def __init__(self, token_ids: list[TokenId], reason: str = "abort") -> None:
        super().__init__(taking=None, answering=AssertionError())
        self.token_ids = token_ids
        self.reason = reason

    async def get(self) -> Any:
        completion = SimpleNamespace(token_ids=self.token_ids, finish_reason=self.reason)
        return SimpleNamespace(outputs=[completion], finished=True, metrics=None)


@pytest.mark.parametrize(
    ("reason", "name", "code"),
    [("abort", "RequestAborted", "not_ready"), ("error", "RequestErrored", "internal")],
)
@pytest.mark.parametrize("token_ids", [[], [1, 2]], ids=["before its first token", "after it"])
async def test_a_request_that_vllm_gives_up_has_its_tokens_and_then_fails(
    monkeypatch: pytest.MonkeyPatch, token_ids: list[TokenId], reason: str, name: str, code: str
) -> None:
    """As all do that run when vLLM is paused, and one that it has not understood. It has no answer
    that began, and none that ended."""
    monkeypatch.setattr("engine.backends.vllm.core._refusals", lambda: (ValueError,))
    monkeypatch.setattr(VllmCore, "_sampling_params", lambda *_: None)
    llm = AbortingLlm(token_ids, reason)
    core = VllmCore(llm, 100, takes_seeds=False, is_owner=False)
    directive = Directive(request_id="r", scope="s", wants=[])
    outputs = list[Output]()
    with pytest.raises(TurnFailed, match=name) as ended:
        async for output in core.generate(an_order(), directive):
            outputs.append(output)
    assert ended.value.code == code
    assert [token for output in outputs for token in output.token_ids] == token_ids
    assert not any(output.is_last for output in outputs)


async def test_an_image_that_can_not_be_decoded_again_ends_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could be when its prompt was prepared: since then there may be less memory."""

    async def fail(_prompt: ImagePrompt) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr("engine.backends.vllm.core._refusals", lambda: (ValueError,))
    monkeypatch.setattr("engine.backends.vllm.core._prompt_of", fail)
    core = VllmCore(AbortingLlm([]), 100, takes_seeds=False, is_owner=False)
    directive = Directive(request_id="r", scope="s", wants=[])
    with pytest.raises(TurnFailed, match="MemoryError"):
        await anext(aiter(core.generate(an_order(ImagePrompt([1], [])), directive)))


async def test_an_answer_that_vllm_gives_up_is_told_and_counted_by_its_cause() -> None:
    core = ScriptedCore()
    async with loaded(core) as (backend, crashes):
        core.ends_turn = TurnFailed(RequestAborted())
        core.ends_after = 1
        frames = [frame async for frame in await backend.open(request(prompt("Is it?")))]
        assert isinstance(frames[0], Started) and isinstance(frames[-1], Done)
        (finished,) = [frame for frame in frames if isinstance(frame, Finished)]
        ending = (finished.reason, finished.code, finished.output_tokens)
        assert ending == ("failed", "not_ready", 1)
        (counts,) = await backend.unacknowledged()
        assert (counts.reason, counts.output_tokens) == ("failed", 1)
        assert counts.usage == frames[0].usage
        assert not crashes


async def test_a_turn_that_vllm_ends_fails_alone_and_later_ones_are_answered() -> None:
    core = ScriptedCore()
    async with loaded(core) as (backend, crashes):
        core.ends_turn = TurnFailed(CarriesStatus("status_code", 503))
        frames = [frame async for frame in await backend.open(request(prompt("Is it?")))]
        failed = frames[-1]
        assert isinstance(failed, Failed)
        assert failed.code == "not_ready" and "CarriesStatus" in failed.message
        core.ends_turn = None
        _, parts, _ = await said(backend, "next", prompt("Is it?", system=SYSTEM))
        assert parts
        assert not crashes
        await backend.abandon("why it is off")
        with pytest.raises(NotReady, match="why it is off"):
            await backend.stats()

"""What vLLM's scheduler lost is told while no request of ours runs: others use the server too."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from engine.backends.vllm.backend import VllmBackend
from engine.backends.vllm.directive import Loss
from engine.protocol import Message, Prompt, TextPart
from tests.engine.backends.vllm.scripted_core import ScriptedCore, loaded, said
from tests.engine.text.format_cases import renderer

WAIT_SECONDS = 60


class LosingCore(ScriptedCore):
    """Loses what it is told to, once, as vLLM's scheduler does for other clients."""

    lost: list[Loss]
    failure: Exception | None = None

    async def losses(self) -> list[Loss]:
        if self.failure is not None:
            raise self.failure
        told, self.lost = self.lost, []
        return told

    @property
    def held(self) -> set[str]:
        return set(self._held)


@asynccontextmanager
async def with_an_entry() -> AsyncIterator[tuple[VllmBackend, LosingCore, list[BaseException]]]:
    model = renderer("qwen2.5")
    core = LosingCore(model)
    core.text, core.lost = "Yes.", []
    async with loaded(core, model) as (backend, crashes):
        text = "What everybody reads. " * 20
        prompt = Prompt([Message("user", [TextPart("Is it?")])], [], [TextPart(text)])
        started, _, _ = await said(backend, 0, prompt, thinking=False)
        assert started.usage.cache_write_5m_tokens > 0
        yield backend, core, crashes


async def until(holds: Callable[[], Any]) -> None:
    with anyio.fail_after(WAIT_SECONDS):
        while not await holds():
            await anyio.sleep(0.05)


@pytest.mark.anyio
async def test_an_entry_that_other_clients_took_ends_without_a_turn_of_ours() -> None:
    async with with_an_entry() as (backend, core, crashes):
        assert (await backend.stats()).num_entries == len(core.held) > 0

        async def are_gone() -> bool:
            return (await backend.stats()).num_entries == 0

        core.lost = [Loss(key=key, reason="evicted") for key in core.held]
        await until(are_gone)
        assert not crashes


@pytest.mark.anyio
async def test_a_lease_that_other_clients_ended_is_called_leased_no_more() -> None:
    async with with_an_entry() as (backend, core, _):
        assert (await backend.stats()).num_leases == len(core.held)

        async def are_ended() -> bool:
            return (await backend.stats()).num_leases == 0

        core.lost = [Loss(key=key, reason="sacrificed") for key in core.held]
        await until(are_ended)
        assert (await backend.stats()).num_entries == len(core.held)


@pytest.mark.anyio
async def test_a_connector_that_is_off_is_told_without_a_turn_of_ours() -> None:
    async with with_an_entry() as (_, core, crashes):

        async def is_told() -> bool:
            return bool(crashes)

        core.failure = RuntimeError("the connector is off")
        await until(is_told)
        assert crashes == [core.failure]

"""The synthetic engine: it has a real pool, entries, leases, scheduler and protocol, and no model.

A time model stands in for the computation, and a fixed rule for the text. The engine is for load
tests, simulation and the gateway's tests. It says `synthetic` wherever it shows.

`synthetic_renderer.py` says what its tokens and its answers are.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.backends.base import Parts, Progress
from engine.backends.prepare.prepared import WorkerSpec
from engine.backends.synthetic_renderer import BYTES_PER_TOKEN, SyntheticRenderer
from engine.cache.ids import BlockId, TokenId
from engine.cache.store_tier import Payload
from engine.protocol.reports import Description
from engine.schedule.runner import Work
from engine.settings import Settings

STEP_TOKENS = 512
CONTEXT_TOKENS = 131_072
DEFAULT_NUM_BLOCKS = 65_536
KV_BYTES_PER_TOKEN = 131_072
"""The bytes of a token that copies between device and host are charged for: Llama-3-8B's in 16
bits."""
COPY_BYTES_PER_SECOND = 10e9


def load_synthetic(
    settings: Settings, progress: Progress, sleep: Callable[[float], None] = time.sleep
) -> Parts:
    progress("ready", 1.0)
    runner = SyntheticRunner(
        prefill_seconds=settings.synthetic_prefill_us / 1e6,
        decode_seconds=settings.synthetic_decode_ms / 1e3,
        copy_seconds=settings.block_size * KV_BYTES_PER_TOKEN / COPY_BYTES_PER_SECOND,
        sleep=sleep,
    )
    return Parts(
        runner=runner,
        model_seconds=runner.seconds_of,
        renderer=SyntheticRenderer(),
        worker=WorkerSpec(kind="synthetic"),
        step_tokens=STEP_TOKENS,
        block_bytes=settings.block_size * KV_BYTES_PER_TOKEN,
        facts={"backend": "synthetic", "block size": str(settings.block_size)},
        description=Description(
            backend="synthetic",
            model=settings.synthetic_model,
            epoch="",
            max_context_tokens=CONTEXT_TOKENS,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks or DEFAULT_NUM_BLOCKS,
            granularity=1,
            min_cache_tokens=settings.min_cache_tokens,
            capabilities=[
                "copy_on_write",
                "multiple_choices",
                "tools",
                "block_map",
                "service_class",
                "own_template",
            ],
            prefix_order="tools_first",
            max_running=settings.max_running,
            longest_token_bytes=BYTES_PER_TOKEN,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticRunner:
    """A runner that only sleeps.

    Prefill takes time for each token, one sequence after the other. A decode step takes the same
    time for any number of sequences. A copy of a block to the host or back takes time. Copies on
    the device take none.
    """

    prefill_seconds: float
    decode_seconds: float
    copy_seconds: float
    sleep: Callable[[float], None]

    def seconds_of(self, works: Sequence[Work]) -> float:
        """What a step takes by the settings. A sleep lasts longer on a busy machine."""
        prefilled = sum(len(work.token_ids) for work in works if len(work.token_ids) > 1)
        decodes = any(len(work.token_ids) == 1 for work in works)
        return prefilled * self.prefill_seconds + decodes * self.decode_seconds

    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        seconds = self.seconds_of(works)
        if seconds:
            self.sleep(seconds)
        return [None if work.sample is None else _next_token(work) for work in works]

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """There is no memory to copy."""

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """There is no memory to clear."""

    def clear_from(self, places: Sequence[tuple[BlockId, int]]) -> None:
        """There is no memory to clear."""

    clear_host = clear_from

    def demote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._wait_for(len(pairs))

    def promote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._wait_for(len(pairs))

    def save(self, blocks: Sequence[BlockId]) -> list[bytes]:
        return [b"" for _ in blocks]

    def load(self, loads: Sequence[tuple[Payload, BlockId]]) -> None:
        self._wait_for(len(loads))

    def _wait_for(self, num_copies: int) -> None:
        if num_copies:
            self.sleep(num_copies * self.copy_seconds)


def _next_token(work: Work) -> TokenId:
    """The first token that is allowed, or else the number of tokens so far."""
    if work.allowed is None:
        return (work.start + len(work.token_ids)) & 0xFFFF
    at = next((index for index, byte in enumerate(work.allowed) if byte), 0)
    byte = work.allowed[at] if work.allowed else 0
    return 8 * at + max((byte & -byte).bit_length() - 1, 0)

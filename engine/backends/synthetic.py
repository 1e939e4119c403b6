"""The synthetic engine: real pool, entries, leases, scheduler and protocol; no model.

A time model stands in for the computation and a fixed rule for the text. It is for load tests,
simulation and the gateway's tests, and says `synthetic` wherever it shows.

Tokens: one per 4 UTF-8 bytes of text, cut anew in each segment, so that counts can be worked out by
hand. Rendering: the segments' text and, after a chat, GENERATION_TOKENS of scaffold. Answers: the
words "synthetic 0 1 2 …" until `max_tokens`; no stop but that and stop sequences.
"""

import time
from array import array
from collections.abc import Callable, Sequence

import msgspec

from engine.backends.base import Parts, Progress
from engine.backends.prepare.prepared import WorkerSpec
from engine.cache.ids import BlockId, TokenId
from engine.cache.store_files import Payload
from engine.protocol import (
    Delta,
    Description,
    FinishReason,
    GenerateRequest,
    Prompt,
    TextDelta,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.schedule.logprobs import Spelled, unspelled
from engine.schedule.output import OutputParser
from engine.schedule.runner import Stop, Work
from engine.settings import Settings
from engine.text.days import KnownDays
from engine.text.formats.stops import StopFinder, StopStrings
from engine.text.rendered import RenderedPrompt, SegmentSpan

BYTES_PER_TOKEN = 4
GENERATION_TOKENS = 4
STEP_TOKENS = 512
DEFAULT_NUM_BLOCKS = 65_536
KV_BYTES_PER_TOKEN = 131_072
"""Llama-3-8B's in 16 bits: the bytes that a copy between device and host is taken to move."""
COPY_BYTES_PER_SECOND = 10e9
NUM_LAYERS = 32
"""Llama-3-8B's too. A step that may be stopped ends at its next layer, as a model's does."""
LEAST_PIECE_SECONDS = 0.0005
"""The shortest sleep of a thread that is not mostly late."""
_SCAFFOLD = [0xFFFFFFF0 + i for i in range(GENERATION_TOKENS)]


def load_synthetic(
    settings: Settings, progress: Progress, sleep: Callable[[float], None] = time.sleep
) -> Parts:
    progress("ready", 1.0)
    return Parts(
        runner=SyntheticRunner(
            prefill_seconds=settings.synthetic_prefill_us / 1e6,
            decode_seconds=settings.synthetic_decode_ms / 1e3,
            copy_seconds=settings.block_size * KV_BYTES_PER_TOKEN / COPY_BYTES_PER_SECOND,
            sleep=sleep,
        ),
        renderer=SyntheticRenderer(),
        worker=WorkerSpec(kind="synthetic"),
        step_tokens=STEP_TOKENS,
        block_bytes=settings.block_size * KV_BYTES_PER_TOKEN,
        facts={"backend": "synthetic", "block size": str(settings.block_size)},
        description=Description(
            backend="synthetic",
            model="synthetic",
            epoch="",
            max_context_tokens=settings.synthetic_context,
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
            ttl_scale=settings.ttl_scale,
            max_running=settings.max_running,
            longest_token_bytes=BYTES_PER_TOKEN,
        ),
    )


class SyntheticRunner:
    """Prefill takes its time per token, one sequence after the other; a decode step one time.

    A block takes its time on the way to the host or back; copies on the device take none.
    """

    def __init__(
        self,
        *,
        prefill_seconds: float,
        decode_seconds: float,
        copy_seconds: float,
        sleep: Callable[[float], None],
    ) -> None:
        self._copy_seconds = copy_seconds
        self._prefill_seconds = prefill_seconds
        self._decode_seconds = decode_seconds
        self._sleep = sleep

    def execute(
        self, works: Sequence[Work], stop: Stop | None = None
    ) -> list[TokenId | None] | None:
        prefilled = sum(len(work.token_ids) for work in works if len(work.token_ids) > 1)
        decodes = any(len(work.token_ids) == 1 for work in works)
        seconds = prefilled * self._prefill_seconds + decodes * self._decode_seconds
        piece = max(seconds / NUM_LAYERS, LEAST_PIECE_SECONDS)
        while stop is not None and seconds > piece:
            if stop():
                return None
            self._sleep(piece)
            seconds -= piece
        if seconds:
            self._sleep(seconds)
        return [None if work.sample is None else _next_token(work) for work in works]

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """There is no memory to copy."""

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
            self._sleep(num_copies * self._copy_seconds)


def _next_token(work: Work) -> TokenId:
    """The first token that is allowed, or else the number of tokens so far."""
    if work.allowed is None:
        return (work.start + len(work.token_ids)) & 0xFFFF
    at = next((index for index, byte in enumerate(work.allowed) if byte), 0)
    byte = work.allowed[at] if work.allowed else 0
    return 8 * at + max((byte & -byte).bit_length() - 1, 0)


class SyntheticRenderer:
    writes_date = False

    def render(
        self, prompt: Prompt, *, thinking: bool, scope: str, days: KnownDays | None = None
    ) -> RenderedPrompt:
        tokens: list[TokenId] = []
        spans: list[SegmentSpan] = []
        for text in segment_texts(prompt):
            start = len(tokens)
            tokens.extend(_tokenize(text))
            spans.append(SegmentSpan(len(tokens), start, _character_ends(text)))
        scaffold = _SCAFFOLD if prompt.text is None else []
        return RenderedPrompt(tokens + scaffold, spans)

    def parser(self, request: GenerateRequest) -> "SyntheticParser":
        return SyntheticParser(StopStrings(request.sampling.stop_sequences))

    def spelled(self, token_id: TokenId) -> Spelled:
        return unspelled(token_id)

    def parsers(self, request: GenerateRequest) -> list[OutputParser]:
        stops = StopStrings(request.sampling.stop_sequences)
        return [SyntheticParser(stops) for _ in range(request.sampling.num_choices)]


class SyntheticParser:
    def __init__(self, stops: StopStrings) -> None:
        self.finish: FinishReason | None = None
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self.allowed: bytes | None = None
        self.mask = None
        self._stops = StopFinder(stops)
        self._num_words = 0

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        word = f" {self._num_words - 1}" if self._num_words else "synthetic"
        self._num_words += 1
        text = self._stops.feed(word)
        if self._stops.found is not None:
            self.finish, self.stop_sequence = "stop_sequence", self._stops.found
        return [TextDelta(text)] if text else []

    def close(self) -> Sequence[Delta]:
        text = self._stops.flush()
        return [TextDelta(text)] if text else []


def segment_texts(prompt: Prompt) -> list[str]:
    """What each segment renders to, in order. Roles are part of the text, as in a template."""
    if prompt.text is not None:
        return [prompt.text]
    texts = [msgspec.json.encode(tool).decode() for tool in prompt.tools]
    texts += [part.text for part in prompt.system]
    for message in prompt.messages:
        for part in message.parts:
            match part:
                case TextPart(text) | ThinkingPart(text) | ToolResultPart(_, text):
                    texts.append(text)
                case ToolUsePart():
                    texts.append(msgspec.json.encode(part).decode())
    return texts


def _tokenize(text: str) -> list[TokenId]:
    """Four bytes are a token; 0xFF, which is in no UTF-8 text, fills the last one up."""
    data = text.encode()
    return array("I", data + b"\xff" * (-len(data) % BYTES_PER_TOKEN)).tolist()


def _character_ends(text: str) -> Sequence[int]:
    """Exact for ASCII; for other text the characters are counted per token."""
    num_tokens = -(-len(text.encode()) // BYTES_PER_TOKEN)
    if text.isascii():
        return range(BYTES_PER_TOKEN, BYTES_PER_TOKEN * num_tokens + 1, BYTES_PER_TOKEN)
    data = text.encode()
    return [
        len(data[: (i + 1) * BYTES_PER_TOKEN].decode(errors="ignore")) for i in range(num_tokens)
    ]

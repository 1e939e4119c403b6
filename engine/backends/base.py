"""What backends are made of: parts, renderers, bodies and their frames."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from engine.backends.adapters import AdapterParts
from engine.backends.prepare.prepared import WorkerSpec
from engine.cache.ids import TokenId
from engine.errors import InvalidRequest
from engine.protocol import (
    Capability,
    CountRequest,
    Frame,
    GenerateRequest,
    Prompt,
)
from engine.protocol.reports import Description, Guarantee
from engine.schedule.output import OutputParser, Spelled
from engine.schedule.request import Drafter
from engine.schedule.runner import Compressor, Runner
from engine.text.rendered import KnownDays, RenderedPrompt

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Takes a stage's name and the fraction of the load that is done, 0 to 1."""

Body = bytes | GenerateRequest | CountRequest
"""A request's JSON as it came, or one that this process made itself."""


class Generation(Protocol):
    """A request's frames; None is a heartbeat. Closing it, or dropping it, cancels the request."""

    def __aiter__(self) -> AsyncIterator[Frame | None]: ...

    def close(self) -> None: ...


class Renderer(Protocol):
    """Prompt to tokens, tokens to deltas. `render` may be slow: workers do it.

    The render cache is kept apart by `scope`, so that its speed reveals nothing of other scopes.
    `parsers` makes one for each choice. It compiles what a request demands once, without the
    interpreter's lock, and raises InvalidRequest. If `writes_date`, `days` say which
    date. `spelled` gives the text that a token stands for.
    """

    @property
    def writes_date(self) -> bool: ...
    def render(
        self, prompt: Prompt, *, thinking: bool, scope: str, days: KnownDays | None = None
    ) -> RenderedPrompt: ...
    def parsers(self, request: GenerateRequest) -> Sequence[OutputParser]: ...
    def spelled(self, token_id: TokenId) -> Spelled: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a loaded engine. `description` lacks only the epoch.

    `step_tokens` is the default of tokens computed in one step. Decoding and cancelling wait for a
    step, so it should take about 0.1 s. A copy of one block moves `block_bytes`. `worker` says how
    a worker process makes the same renderer; None if it can't. `facts` are what a block's content
    depends on besides its tokens; None if its blocks can't be stored. `new_drafter` makes what
    proposes a choice's next tokens; None without speculation. A recurrent state takes
    `state_blocks`; 0 for a model without linear layers. `adapters` are those of the settings.
    `compressor` is there where prefixes may be compressed.
    """

    runner: Runner
    renderer: Renderer
    description: Description
    step_tokens: int
    block_bytes: int
    worker: WorkerSpec | None = None
    facts: Mapping[str, str] | None = None
    new_drafter: Callable[[], Drafter] | None = None
    state_blocks: int = 0
    adapters: AdapterParts | None = None
    compressor: Compressor | None = None


def own_guarantees(capabilities: Collection[Capability]) -> list[Guarantee]:
    """Of engines whose blocks are their own, or are leased inside vLLM."""
    forced = "forced_tools" in capabilities
    return [
        Guarantee("exact_read", True, "from its blocks"),
        Guarantee("exact_write", True, "from its blocks"),
        Guarantee("hold", True, "leases"),
        Guarantee("isolation", True, "blocks are found by scope"),
        Guarantee("events", True, "leases and names"),
        Guarantee("forced_tools", forced, "grammars" if forced else "not for this template"),
    ]


def decoder_of(kind: type[T]) -> Callable[[bytes], T]:
    """A decoder of JSON bodies; whatever the bytes are, its only error is InvalidRequest.

    msgspec lets invalid UTF-8 and very deep nesting out as errors of their own.
    """
    decoder = msgspec.json.Decoder(kind)

    def decode(body: bytes) -> T:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error)) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise InvalidRequest("the body is not valid JSON") from None

    return decode

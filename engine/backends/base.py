"""The things that every backend is made of: parts, bodies and their frames."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engine.approximate.asking import Approximations
from engine.backends.adapters import AdapterParts
from engine.backends.prepare.prepared import WorkerSpec
from engine.backends.renderer import Renderer
from engine.protocol import CountRequest, Done, Failed, Frame, GenerateRequest
from engine.protocol.reports import Description, Guarantee
from engine.schedule.request import Drafter
from engine.schedule.runner import Runner, Work

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Takes a stage's name and the fraction of the load that is done, 0 to 1."""

HEARTBEAT_SECONDS = 5.0
Body = bytes | GenerateRequest | CountRequest
"""A request's JSON as it came, or one that this process made itself."""


def on_event_loop(
    event_loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T
) -> None:
    """Call a function on the event loop, from any thread. After the loop's end it is not called."""
    if not event_loop.is_closed():
        event_loop.call_soon_threadsafe(function, argument)


class Generation:
    """A request's frames, as an async iterator; None is a heartbeat.

    `max_tokens` or the context bounds the number of frames, so the queue has no bound of its own.
    When the reader goes away (cancelled, closed, or without reading a frame), the request is
    cancelled.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self._event_loop = event_loop
        self._cancel = cancel
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.is_open = False

    def emit(self, frame: Frame) -> None:
        """Called from the engine's thread."""
        on_event_loop(self._event_loop, self._frames.put_nowait, frame)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._cancel()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Frame | None:
        if not self.is_open:
            raise StopAsyncIteration
        try:
            frame = await asyncio.wait_for(self._frames.get(), HEARTBEAT_SECONDS)
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(frame, Done | Failed):
            self.is_open = False
        return frame

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a loaded engine."""

    runner: Runner
    renderer: Renderer
    # How a worker process makes the same renderer.
    worker: WorkerSpec
    # It lacks what `EngineBackend` adds, such as the epoch.
    description: Description
    # How many tokens one step computes, unless the settings say otherwise. Decoding and
    # cancelling wait for a step, so it should take about 0.1 s.
    step_tokens: int
    # How many bytes a copy of one block moves.
    block_bytes: int
    # What a block's content depends on besides its tokens; None: its blocks can't be stored.
    facts: Mapping[str, str] | None = None
    # Makes a choice's drafter. None: there is no speculation.
    new_drafter: Callable[[], Drafter] | None = None
    # The blocks of a recurrent state. 0: the model has no linear layers.
    state_blocks: int = 0
    # The adapters of the settings; None: there are none.
    adapters: AdapterParts | None = None
    # A step's seconds by a time model that stands in for the computation; None: it computes.
    model_seconds: Callable[[Sequence[Work]], float] | None = None
    # Which approximate prompts it can compute.
    approximate: Approximations = field(default_factory=Approximations)


def own_guarantees(capabilities: Collection[str], *, shared_by: str = "") -> list[Guarantee]:
    """The guarantees of engines whose blocks are their own, or are leased inside vLLM.

    `shared_by` names what may give a scope the content of another scope; empty: nothing does.
    """
    forced = "forced_tools" in capabilities
    apart = "blocks are found by scope"
    if shared_by:
        apart = f"{shared_by} may give one workspace what another wrote"
    return [
        Guarantee("exact_read", True, "from its blocks"),
        Guarantee("exact_write", True, "from its blocks"),
        Guarantee("hold", True, "leases"),
        Guarantee("isolation", not shared_by, apart),
        Guarantee("events", True, "leases and names"),
        Guarantee("forced_tools", forced, "grammars" if forced else "not for this template"),
    ]

"""One response of a turn: its extension object, what all writers keep of it, and its blocks.

For a stream a writer makes events from frames as they come. For an answer in one piece it gathers
the frames, and makes the answer from their blocks at the end.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json

from engine import protocol
from engine.protocol import TTLS, Tier, Ttl
from gateway.base.errors import EngineFailed
from gateway.base.grants import AutoCache
from gateway.prompt.fingerprint import Diagnosis
from gateway.prompt.ignored import Ignored
from gateway.structs.fleet import AutoCacheMode, AutoCacheTtl
from gateway.structs.misses import GatewayMissReason

Event = dict[str, Any]
"""One event of a stream, as its JSON."""
EventT = TypeVar("EventT")
WholeT = TypeVar("WholeT", covariant=True)


@dataclass(slots=True)
class Findings:
    """What the gateway adds to an answer. The turn fills it in; it is complete when the engine's
    first frame is passed on."""

    engine: str = ""
    miss_reason: GatewayMissReason | None = None
    # Why each breakpoint was not read, by its segment; None where it was read.
    missed: dict[int, GatewayMissReason | None] = field(default_factory=dict)
    # The fields of the request that were ignored.
    ignored: list[Ignored] = field(default_factory=list)
    # The engine's TTL classes.
    ttls: Collection[str] = tuple(TTLS)
    # Whether the engine promises to keep workspaces apart.
    is_isolated: bool = True
    # The policy that marked a request without markers.
    auto_cache: AutoCache | None = None
    # The comparison with an earlier turn; None where the client asked for none.
    diagnosis: Diagnosis | None = None


class HoldfastAutoCache(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that added breakpoints. Whether it holds what they write is in their `state`."""

    mode: AutoCacheMode
    ttl: AutoCacheTtl

    @classmethod
    def of(cls, policy: AutoCache) -> "HoldfastAutoCache":
        return cls(mode=policy.mode, ttl=policy.ttl)


class HoldfastBreakpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one marker.

    - `expires_in_seconds`: there only if it is leased
    - `missed`: why what stands up to the marker was not read in full; null where it was. It is not
      there where the engine does not report it. `grew`: what was read ends in front of the marker,
      and nothing ever stood there
    - `is_exact`: false, or not there. False where the entry ends before the marked text does: a
      token that begins in the text could be another with other text behind it
    - `min_cache_tokens`: with `below_minimum`: the fewest tokens that an entry has
    """

    path: str
    state: Literal["leased", "best_effort", "none"]
    tokens: int | None = None
    ttl: Ttl | None = None
    expires_in_seconds: float | None = None
    reason: str | None = None
    missed: str | UnsetType | None = UNSET
    is_exact: bool | UnsetType = UNSET
    min_cache_tokens: int | UnsetType = UNSET


class Holdfast(msgspec.Struct, frozen=True, kw_only=True):
    """Our own part of an answer. Clients that don't know it ignore it.

    - `automatic_tokens`: tokens of the prompt that were reused from memory and not billed as a read
    - `computed_tokens`: tokens of the prompt that went through the model
    - `written_tokens`: tokens billed as writes; there where the dialect's own usage can't say so
    - `miss_reason`: null where all was read, or the prefix grew
    - `ignored`: fields of the request that were not carried out
    - `auto_cache`: there if breakpoints are the server's own
    - `folded`: the paths of system messages that the engine put into the user's turn beside them
    - `read_tier`, `bring_back_seconds`: the lowest tier that the read came from, and the seconds
      until all of it was on the device
    - `is_isolated`: false, or not there. False where the engine does not promise to keep workspaces
      apart
    - `approximate`: there where the answer was computed behind a part of its prefix
    """

    engine: str
    automatic_tokens: int
    computed_tokens: int
    written_tokens: int | UnsetType = UNSET
    breakpoints: list[HoldfastBreakpoint]
    miss_reason: str | None = None
    ignored: Sequence[Ignored] | UnsetType = UNSET
    auto_cache: HoldfastAutoCache | UnsetType = UNSET
    folded: Sequence[str] | UnsetType = UNSET
    read_tier: Tier | UnsetType = UNSET
    bring_back_seconds: float | UnsetType = UNSET
    approximate: protocol.Approximation | UnsetType = UNSET
    is_isolated: bool | UnsetType = UNSET


def extension_of(
    started: protocol.Started,
    findings: Findings,
    paths: Sequence[str],
    written_tokens: int | UnsetType = UNSET,
) -> Holdfast:
    """`paths` name the request's segments, in prompt order."""
    auto_cache = findings.auto_cache
    return Holdfast(
        engine=findings.engine,
        automatic_tokens=started.usage.automatic_tokens,
        computed_tokens=started.usage.computed_tokens,
        written_tokens=written_tokens,
        breakpoints=[
            HoldfastBreakpoint(
                path=paths[report.segment],
                state=report.state,
                tokens=report.tokens,
                ttl=report.ttl,
                expires_in_seconds=report.expires_in_seconds,
                reason=report.reason,
                missed=findings.missed.get(report.segment, UNSET),
                is_exact=False if report.segment in started.inexact else UNSET,
                min_cache_tokens=report.min_cache_tokens,
            )
            for report in started.breakpoints
        ],
        miss_reason=findings.miss_reason,
        ignored=findings.ignored or UNSET,
        auto_cache=HoldfastAutoCache.of(auto_cache) if auto_cache else UNSET,
        folded=[paths[segment] for segment in started.folded] or UNSET,
        read_tier=started.read_tier or UNSET,
        bring_back_seconds=started.bring_back_seconds or UNSET,
        approximate=started.approximate or UNSET,
        is_isolated=UNSET if findings.is_isolated else False,
    )


@dataclass(slots=True)
class Block:
    """A run of text or thinking, or one call with the JSON of its input."""

    kind: Literal["text", "thinking", "call"]
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    drawn: list[protocol.DrawnToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True, kw_only=True)
class Writer(Generic[EventT, WholeT]):
    """Writes one answer in its dialect."""

    id: str
    model: str
    # The turn's findings. They are read when the engine's first frame has come.
    findings: Findings
    # The path of each segment in the request, for the extension object.
    paths: Sequence[str]
    num_choices: int = 1
    # Whether thinking is left out of the answer. It is counted all the same.
    hides_thinking: bool = False
    usage: protocol.InputUsage = field(default_factory=lambda: protocol.InputUsage(input_tokens=0))
    extension: Holdfast | UnsetType = UNSET
    finished: dict[int, protocol.Finished] = field(default_factory=dict)
    output_tokens: int = 0
    is_done: bool = False
    _choices: dict[int, list[Block]] = field(default_factory=dict)

    def write(self, frame: protocol.Frame) -> Iterator[EventT]:
        """The events of one frame, each of which goes out once."""
        raise NotImplementedError

    def write_all(self, frames: Iterable[protocol.Frame]) -> list[EventT]:
        """The events of frames that came together."""
        events: list[EventT] = []
        for frame in frames:
            events += self.write(frame)
        return events

    def whole(self) -> WholeT:
        """The answer made from the gathered frames. Raise EngineFailed if it is not whole."""
        raise NotImplementedError

    def note(self, frame: protocol.Frame) -> None:
        """Keep what the frames at the answer's beginning and end report."""
        if isinstance(frame, protocol.Delta):
            return
        match frame:
            case protocol.Started():
                self.usage = frame.usage
                self.begin(frame)
            case protocol.Finished():
                self.finished[frame.choice] = frame
            case protocol.Done():
                if len(self.finished) != self.num_choices:
                    raise EngineFailed
                self.output_tokens = frame.output_tokens
                self.is_done = True

    def begin(self, started: protocol.Started) -> None:
        """Keep what the engine's first frame reports."""
        written_tokens = started.usage.written_tokens
        self.extension = extension_of(started, self.findings, self.paths, written_tokens)

    def take_all(self, frames: Iterable[protocol.Frame]) -> None:
        for frame in frames:
            self.take(frame)

    def take(self, frame: protocol.Frame) -> None:
        """Take a frame into the blocks of its choice."""
        match frame:
            case protocol.TextDelta():
                block = self._block(frame.choice, "text")
                block.pieces.append(frame.text)
                block.drawn += frame.logprobs
            case protocol.ThinkingDelta():
                if not self.hides_thinking:
                    self._block(frame.choice, "thinking").pieces.append(frame.text)
            case protocol.ToolUseStart():
                call = Block("call", frame.id, frame.name)
                self._choices.setdefault(frame.choice, []).append(call)
            case protocol.ToolInputDelta():
                blocks = self._choices.get(frame.choice)
                if not blocks or blocks[-1].kind != "call":
                    raise EngineFailed
                blocks[-1].pieces.append(frame.partial_json)
            case _:
                self.note(frame)

    @property
    def thinking_tokens(self) -> int:
        return sum(finished.thinking_tokens for finished in self.finished.values())

    def answers(self) -> list[tuple[protocol.Finished, list[Block]]]:
        """Each choice's end and blocks. Raise EngineFailed where the response is not whole."""
        if not self.is_done:
            raise EngineFailed
        return [
            (self.finished[choice], self._choices.get(choice, []))
            for choice in sorted(self.finished)
        ]

    def take_extension(self) -> Holdfast | UnsetType:
        """The extension object at the first call, UNSET later: only the first event has it."""
        extension = self.extension
        self.extension = UNSET
        return extension

    def _block(self, choice: int, kind: Literal["text", "thinking"]) -> Block:
        blocks = self._choices.setdefault(choice, [])
        if not blocks or blocks[-1].kind != kind:
            blocks.append(Block(kind))
        return blocks[-1]


def partial_json(text: str) -> Any:
    """The value of JSON that may be cut off; None where the text is not JSON."""
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None

"""What Google's Interactions API answers: interactions, the events of a stream, and their writer.

`holdfast` is our extension. UNSET fields are not sent. A function call goes out when its input is
complete. A call that was cut off is left out, so that the conversation can go on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from engine import protocol
from gateway.base.errors import EngineFailed
from gateway.dialects.collector import Block, Event, Holdfast, Writer
from gateway.dialects.gemini.response import args_of
from gateway.prompt.ignored import Ignored

Status = Literal["in_progress", "requires_action", "completed", "incomplete"]
NOT_KEPT = "this interaction could not be kept, so no other can go on with it"
_encode = msgspec.json.Encoder().encode


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class Thought(msgspec.Struct, frozen=True, tag_field="type", tag="thought"):
    summary: list[Text]


class ModelOutput(msgspec.Struct, frozen=True, tag_field="type", tag="model_output"):
    content: list[Text]


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    name: str
    arguments: dict[str, Any]


Step = Thought | ModelOutput | FunctionCall


class ModalityTokens(msgspec.Struct, frozen=True):
    tokens: int
    modality: Literal["text"] = "text"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of tokens. Output and thoughts do not overlap.

    - `total_input_tokens`: the whole prompt, with what was read of it
    - `total_cached_tokens`: tokens billed as read, from a cached content or from any other lease
    """

    total_input_tokens: int
    input_tokens_by_modality: list[ModalityTokens]
    total_cached_tokens: int
    cached_tokens_by_modality: list[ModalityTokens] | UnsetType = UNSET
    total_output_tokens: int
    output_tokens_by_modality: list[ModalityTokens]
    total_thought_tokens: int
    total_tool_use_tokens: int = 0
    total_tokens: int


class Interaction(msgspec.Struct, frozen=True, kw_only=True):
    """One interaction. `input` has the steps of the request, where the client wants them."""

    id: str
    object: Literal["interaction"] = "interaction"
    model: str
    status: Status
    created: str
    updated: str
    previous_interaction_id: str | UnsetType = UNSET
    input: list[Raw] | UnsetType = UNSET
    steps: list[Step] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    holdfast: Holdfast | UnsetType = UNSET


def usage_of(usage: protocol.InputUsage, output_tokens: int, thinking_tokens: int) -> Usage:
    read_tokens = usage.cache_read_tokens
    answer_tokens = output_tokens - thinking_tokens
    return Usage(
        total_input_tokens=usage.prompt_tokens,
        input_tokens_by_modality=[ModalityTokens(usage.prompt_tokens)],
        total_cached_tokens=read_tokens,
        cached_tokens_by_modality=[ModalityTokens(read_tokens)] if read_tokens else UNSET,
        total_output_tokens=answer_tokens,
        output_tokens_by_modality=[ModalityTokens(answer_tokens)],
        total_thought_tokens=thinking_tokens,
        total_tokens=usage.prompt_tokens + output_tokens,
    )


@dataclass(slots=True, kw_only=True)
class InteractionWriter(Writer[Event, Interaction]):
    """Writes one interaction and its events."""

    # The interaction as it is now.
    interaction: Interaction
    _index: int = 0
    # The block whose events go out now.
    _block_open: Block | None = None

    def write(self, frame: protocol.Frame) -> Iterator[Event]:
        self.take(frame)
        match frame:
            case protocol.Started():
                yield from self._begin_stream()
            case protocol.TextDelta(text=text):
                yield from self._say("text", text)
            case protocol.ThinkingDelta(text=text):
                if not self.hides_thinking:
                    yield from self._say("thinking", text)
            case protocol.ToolUseStart():
                yield from self._close()
                self._block_open = self._latest()
            case protocol.Finished():
                yield from self._close(is_last=True)
            case protocol.Done():
                self.whole()
                yield {"event_type": "interaction.completed", "interaction": self.interaction}

    def whole(self) -> Interaction:
        [(end, blocks)] = self.answers()
        steps = [step for step in map(_step_of, _complete(blocks)) if step is not None]
        calls = any(isinstance(step, FunctionCall) for step in steps)
        status: Status = "requires_action" if calls else "completed"
        if end.reason in ("length", "context") or len(_complete(blocks)) < len(blocks):
            status = "incomplete"
        self.interaction = msgspec.structs.replace(
            self.interaction,
            status=status,
            steps=steps,
            usage=usage_of(self.usage, self.output_tokens, self.thinking_tokens),
            holdfast=self.extension,
        )
        return self.interaction

    def tell_unkept(self) -> None:
        """Tell the client that no other interaction can go on with this one."""
        holdfast = self.interaction.holdfast
        if isinstance(holdfast, Holdfast):
            earlier = holdfast.ignored if holdfast.ignored is not UNSET else []
            ignored = [*earlier, Ignored("store", NOT_KEPT)]
            changed_holdfast = msgspec.structs.replace(holdfast, ignored=ignored)
            self.interaction = msgspec.structs.replace(self.interaction, holdfast=changed_holdfast)

    def _begin_stream(self) -> Iterator[Event]:
        interaction = msgspec.structs.replace(self.interaction, holdfast=self.extension)
        yield {"event_type": "interaction.created", "interaction": interaction}
        yield {
            "event_type": "interaction.status_update",
            "interaction_id": self.id,
            "status": "in_progress",
        }

    def _say(self, kind: Literal["text", "thinking"], text: str) -> Iterator[Event]:
        if not text:
            return
        block = self._latest()
        if self._block_open is not block:
            yield from self._close()
            self._block_open = block
            yield self._event("step.start", step={"type": _STEP_TYPES[kind]})
        delta: dict[str, Any] = {"type": "text", "text": text}
        if kind == "thinking":
            delta = {"type": "thought_summary", "content": Text(text)}
        yield self._event("step.delta", delta=delta)

    def _close(self, *, is_last: bool = False) -> Iterator[Event]:
        """End the open step. A call goes out here. A last call that was cut off is left out. Raise
        EngineFailed for any other call whose input is no JSON object."""
        block = self._block_open
        self._block_open = None
        if block is None:
            return
        if block.kind == "call":
            arguments = args_of(block)
            if arguments is None and is_last:
                return
            if arguments is None:
                raise EngineFailed
            step = FunctionCall(block.id, block.name, {})
            yield self._event("step.start", step=step)
            json = _encode(arguments).decode()
            delta = {"type": "arguments_delta", "arguments": json}
            yield self._event("step.delta", delta=delta)
        yield self._event("step.stop")
        self._index += 1

    def _event(self, event_type: str, **more: Any) -> Event:
        return {"event_type": event_type, "index": self._index, **more}

    def _latest(self) -> Block:
        return self._choices[0][-1]


_STEP_TYPES = {"text": "model_output", "thinking": "thought"}


def _complete(blocks: Sequence[Block]) -> Sequence[Block]:
    """The blocks without a last call whose input is cut off or malformed."""
    is_cut = bool(blocks) and blocks[-1].kind == "call" and args_of(blocks[-1]) is None
    return blocks[:-1] if is_cut else blocks


def _step_of(block: Block) -> Step | None:
    """The step of a block; None for an empty text. Raise EngineFailed for a call whose input is no
    JSON object."""
    if block.kind == "call":
        arguments = args_of(block)
        if arguments is None:
            raise EngineFailed
        return FunctionCall(block.id, block.name, arguments)
    if not block.text:
        return None
    text = [Text(block.text)]
    return Thought(text) if block.kind == "thinking" else ModelOutput(text)

"""The events of a streamed response; each has a `sequence_number`, counted from 0."""

import msgspec

from gateway.dialects.openai.response import TokenLogprob
from gateway.dialects.responses.response import (
    OutputItem,
    OutputText,
    ReasoningText,
    Response,
    SummaryText,
)


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    sequence_number: int


class Created(_Event, frozen=True, kw_only=True, tag="response.created"):
    response: Response


class InProgress(_Event, frozen=True, kw_only=True, tag="response.in_progress"):
    response: Response


class Completed(_Event, frozen=True, kw_only=True, tag="response.completed"):
    response: Response


class Incomplete(_Event, frozen=True, kw_only=True, tag="response.incomplete"):
    response: Response


class Failed(_Event, frozen=True, kw_only=True, tag="response.failed"):
    response: Response


class Error(_Event, frozen=True, kw_only=True, tag="error"):
    """A failure before the response was created."""

    code: str | None
    message: str
    param: str | None = None
    request_id: str


class ItemAdded(_Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(_Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _Place(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class PartAdded(_Place, frozen=True, kw_only=True, tag="response.content_part.added"):
    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(_Place, frozen=True, kw_only=True, tag="response.content_part.done"):
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDelta(_Place, frozen=True, kw_only=True, tag="response.output_text.delta"):
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(_Place, frozen=True, kw_only=True, tag="response.output_text.done"):
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(_Place, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: int = 0
    delta: str


class ReasoningDone(_Place, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    content_index: int = 0
    text: str


class SummaryAdded(_Place, frozen=True, kw_only=True, tag="response.reasoning_summary_part.added"):
    summary_index: int = 0
    part: SummaryText


class SummaryDelta(_Place, frozen=True, kw_only=True, tag="response.reasoning_summary_text.delta"):
    summary_index: int = 0
    delta: str


class SummaryDone(_Place, frozen=True, kw_only=True, tag="response.reasoning_summary_text.done"):
    summary_index: int = 0
    text: str


class SummaryPartDone(
    _Place, frozen=True, kw_only=True, tag="response.reasoning_summary_part.done"
):
    summary_index: int = 0
    part: SummaryText


class ArgumentsDelta(
    _Place, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(_Place, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class InputDelta(_Place, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(_Place, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


Event = (
    Created | InProgress | Completed | Incomplete | Failed | Error | ItemAdded | ItemDone
    | PartAdded | PartDone | TextDelta | TextDone | ReasoningDelta | ReasoningDone
    | SummaryAdded | SummaryDelta | SummaryDone | SummaryPartDone
    | ArgumentsDelta | ArgumentsDone | InputDelta | InputDone
)  # fmt: skip
FINAL = Completed | Incomplete | Failed

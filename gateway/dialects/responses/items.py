"""Output items that are being written: their events, and what they are in the end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET
from pydantic_core import from_json

from engine.protocol import DrawnToken
from gateway.dialects.openai.logprobs import TokenLogprob, logprobs_of
from gateway.dialects.responses import events
from gateway.dialects.responses.content import Status
from gateway.dialects.responses.events import Event
from gateway.dialects.responses.response import (
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from gateway.dialects.responses.tools import INPUT, Origin


@dataclass(slots=True, kw_only=True)
class OpenItem:
    """One item. `count` gives the next event's number.

    `begin` and `end` yield all events but those of the text between them, which `write` yields.
    """

    id: str
    index: int
    count: Callable[[], int]
    _pieces: list[str] = field(default_factory=list)

    def begin(self) -> Iterator[Event]:
        item = self.item("in_progress")
        yield events.ItemAdded(sequence_number=self.count(), output_index=self.index, item=item)
        yield from self._opening()

    def write(self, text: str, drawn: Sequence[DrawnToken] = ()) -> Iterator[Event]:
        """`drawn` are the tokens behind the text, where the request wants them."""
        self._pieces.append(text)
        yield from self._delta(text, logprobs_of(drawn))

    def end(self, status: Status) -> Iterator[Event]:
        yield from self._closing()
        item = self.item(status)
        yield events.ItemDone(sequence_number=self.count(), output_index=self.index, item=item)

    def item(self, status: Status) -> OutputItem:
        """The item as it is by now."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def _opening(self) -> Iterator[Event]:
        return iter(())

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        return iter(())

    def _closing(self) -> Iterator[Event]:
        return iter(())


@dataclass(slots=True, kw_only=True)
class OpenMessage(OpenItem):
    _logprobs: list[TokenLogprob] = field(default_factory=list)

    def item(self, status: Status) -> OutputItem:
        content = [] if status == "in_progress" else [self._part()]
        return MessageItem(id=self.id, status=status, content=content)

    def _part(self) -> OutputText:
        return OutputText(self.text, logprobs=list(self._logprobs))

    def _opening(self) -> Iterator[Event]:
        yield events.PartAdded(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=OutputText(""),
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        self._logprobs += logprobs
        yield events.TextDelta(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            delta=text,
            logprobs=logprobs,
        )

    def _closing(self) -> Iterator[Event]:
        part = self._part()
        yield events.TextDone(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            text=part.text,
            logprobs=part.logprobs,
        )
        yield events.PartDone(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, part=part
        )


@dataclass(slots=True, kw_only=True)
class OpenReasoning(OpenItem):
    """Thinking, in words. `seal` makes of it what the client sends back."""

    seal: Callable[[str], str] | None

    def item(self, status: Status) -> OutputItem:
        if status == "in_progress":
            return ReasoningItem(id=self.id, status=status, content=[])
        return ReasoningItem(
            id=self.id,
            status=status,
            content=[ReasoningText(self.text)],
            encrypted_content=self._sealed(),
        )

    def _sealed(self) -> str:
        return UNSET if self.seal is None else self.seal(self.text)  # type: ignore[return-value]

    def _opening(self) -> Iterator[Event]:
        yield events.PartAdded(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=ReasoningText(""),
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield events.ReasoningDelta(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, delta=text
        )

    def _closing(self) -> Iterator[Event]:
        text = self.text
        yield events.ReasoningDone(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, text=text
        )
        yield events.PartDone(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=ReasoningText(text),
        )


class OpenSummary(OpenReasoning):
    """Thinking for a client that asked for its summary. All of it is the summary."""

    __slots__ = ()

    def item(self, status: Status) -> OutputItem:
        if status == "in_progress":
            return ReasoningItem(id=self.id, status=status)
        return ReasoningItem(
            id=self.id,
            status=status,
            summary=[SummaryText(self.text)],
            encrypted_content=self._sealed(),
        )

    def _opening(self) -> Iterator[Event]:
        yield events.SummaryAdded(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=SummaryText(""),
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield events.SummaryDelta(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, delta=text
        )

    def _closing(self) -> Iterator[Event]:
        text = self.text
        yield events.SummaryDone(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, text=text
        )
        yield events.SummaryPartDone(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=SummaryText(text),
        )


@dataclass(slots=True, kw_only=True)
class OpenCall(OpenItem):
    call_id: str
    origin: Origin

    def item(self, status: Status) -> OutputItem:
        return FunctionCallItem(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.origin.name,
            namespace=self.origin.namespace or UNSET,
            arguments=self.text,
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield events.ArgumentsDelta(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, delta=text
        )

    def _closing(self) -> Iterator[Event]:
        yield events.ArgumentsDone(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            name=self.origin.name,
            arguments=self.text,
        )


class OpenCustomCall(OpenCall):
    """The model writes an object with one string; the client gets the string when it is whole."""

    __slots__ = ()

    def item(self, status: Status) -> OutputItem:
        return CustomCallItem(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.origin.name,
            namespace=self.origin.namespace or UNSET,
            input="" if status == "in_progress" else _input_in(self.text),
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        return iter(())

    def _closing(self) -> Iterator[Event]:
        text = _input_in(self.text)
        yield events.InputDelta(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, delta=text
        )
        yield events.InputDone(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, input=text
        )


def _input_in(text: str) -> str:
    """The string in the model's object, or what there is of it; else all that the model wrote."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        return text
    found = value.get(INPUT, "") if isinstance(value, dict) else None
    return found if isinstance(found, str) else text

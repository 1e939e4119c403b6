"""The messages through a worker's pipe: msgpack behind a length of 4 bytes, big-endian."""

from typing import Literal

import msgspec

from engine.cache.lookup import Segment
from engine.protocol import CountReply, ErrorCode, HeldName, Image, UnheldTool
from engine.protocol.reports import Description
from engine.text.rendered import DatedBeginning, KnownDays

LENGTH_BYTES = 4
Kind = Literal["generate", "count"]
GENERATE: Kind = "generate"
COUNT: Kind = "count"
Verdict = Literal["yes", "costly", "later"]


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which renderer a worker process loads: the model's own, or the synthetic engine's."""

    kind: Literal["chat", "synthetic"]
    # The directory or hub id of the tokenizer.
    model: str = ""
    # A chat template that replaces the model's; None: the model's.
    template: str | None = None
    # Further tokens that end a turn, besides those of the model's files.
    end_token_ids: list[int] = []
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    # The text that stands for an image in a prompt; empty: the model reads no images.
    image_text: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a worker."""

    spec: WorkerSpec
    description: Description
    # The most memory that it may allocate beyond that of its start.
    memory_bytes: int
    # The most time for one request. A worker that takes longer ends itself.
    seconds: float
    # The most processor time for one grammar. A worker that takes longer ends itself.
    grammar_seconds: float
    # The most wall time for one grammar.
    compile_seconds: float


class Job(msgspec.Struct, frozen=True, tag="job"):
    """One request to prepare."""

    kind: Kind
    # The request's JSON as it came.
    body: bytes
    # For templates that write the date.
    days: KnownDays | None = None


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """A worker's question before it compiles a request's grammar, which may end the worker."""

    # A digest of all that decides the grammar.
    digest: bytes
    # The message for the client if the grammar takes too much.
    refusal: str
    # Whether the request is then prepared without the grammar, instead of refused.
    is_optional: bool = False


class MayCompile(msgspec.Struct, frozen=True, tag="may_compile"):
    """The answer to `Grammar`.

    `yes`: compile it. `costly`: it is known to take too much. `later`: not on this worker now.
    """

    verdict: Verdict


class Postponed(msgspec.Struct, frozen=True, tag="postponed"):
    """The request must be sent again, to a worker that may compile the grammar of this digest."""

    digest: bytes


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """A rendered request."""

    # The request as JSON, without the texts of its prompt (`without_texts`).
    request: bytes
    # The prompt's token ids as native 32-bit words.
    token_ids: bytes
    # Each `end` is floored to the engine's granularity, unless the prompt has images.
    segments: list[Segment]
    names: list[HeldName]
    # The demands on tool calls that no grammar can guarantee.
    unheld: list[UnheldTool] = []
    # The segments of system messages whose text a user's turn has.
    folded: list[int] = []
    # The breakpoints' segments whose end in the tokens lies before their text's end.
    inexact: list[int] = []
    # The day that the template wrote; None: it wrote none.
    dated: DatedBeginning | None = None
    # The longest lifetime of the breakpoints.
    lease_seconds: float = 0.0
    # In the order of their places. Each has one token here, until the prompt is expanded.
    images: list[Image] = []
    # For each of the request's documents, the tokens before its text.
    begins: list[int] = []
    # Packed ids that identify content in place of `token_ids`; empty: `token_ids` do.
    keys: bytes = b""


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """The answer to `POST /v1/count`."""

    reply: CountReply
    images: list[Image] = []
    # The packed token ids; empty: the prompt has no images.
    token_ids: bytes = b""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Why the request can't be served."""

    code: ErrorCode
    message: str
    is_public: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The answer to `Start`."""


Answer = Prepared | Counted | Refused | Ready | Postponed
"""A worker's last message about a `Start` or a `Job`."""
ToWorker = Start | Job | MayCompile
FromWorker = Answer | Grammar

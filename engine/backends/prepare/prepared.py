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
    # Taken in place of the model's own.
    template: str | None = None
    # Tokens that end a turn, beside those that the tokenizer's files name.
    end_token_ids: list[int] = []
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    # The renderer's.
    image_text: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a worker."""

    spec: WorkerSpec
    description: Description
    # What it may allocate beyond its start.
    memory_bytes: int
    # A worker that works on one request for longer ends itself.
    seconds: float
    # So does a worker whose grammar takes more processor time. Nothing else ends a compilation.
    grammar_seconds: float
    # What a compilation may take on the wall.
    compile_seconds: float


class Job(msgspec.Struct, frozen=True, tag="job"):
    """One request to prepare."""

    kind: Kind
    # The client's JSON as it came.
    body: bytes
    # For templates that write the date.
    days: KnownDays | None = None


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """What a worker asks before it compiles a request's grammar, which may end the worker."""

    # Of what decides the grammar.
    digest: bytes
    # The client's message where the grammar takes too much.
    refusal: str
    # It is left out then, and the request is prepared without it.
    is_optional: bool = False


class MayCompile(msgspec.Struct, frozen=True, tag="may_compile"):
    """The answer to `Grammar`: go on, it is known to take too much, or not on this worker now."""

    verdict: Verdict


class Postponed(msgspec.Struct, frozen=True, tag="postponed"):
    """The request must come again when another worker may compile the grammar of this digest."""

    digest: bytes


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """A rendered request."""

    # As JSON, without the prompt's texts: nobody reads them any more. It still has the tools' names
    # and schemas, where calls are parsed, and what kinds of parts the last message has.
    request: bytes
    # Native 32-bit words.
    token_ids: bytes
    # A segment's `end` is floored to the engine's granularity, unless there are images.
    segments: list[Segment]
    names: list[HeldName]
    # The strict tools whose calls no grammar keeps to their schemas.
    unheld: list[UnheldTool] = []
    # The segments that are told in the user's turn.
    folded: list[int] = []
    # The breakpoints' segments whose end in the tokens lies before their text's end.
    inexact: list[int] = []
    # The day that the template wrote.
    dated: DatedBeginning | None = None
    # The longest lifetime of the breakpoints.
    lease_seconds: float = 0.0
    # In the order of their places. The program that computes says how many tokens each image has.
    images: list[Image] = []
    # For each of the request's documents, the tokens in front of its text.
    begins: list[int] = []
    # The token ids by which content is known, where they are others.
    keys: bytes = b""


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """The answer to `POST /v1/count`."""

    reply: CountReply
    images: list[Image] = []
    # The packed ones, where there are images.
    token_ids: bytes = b""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The request can't be served, and why."""

    code: ErrorCode
    message: str
    is_public: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The answer to `Start`."""


Answer = Prepared | Counted | Refused | Ready | Postponed
"""Of a worker, when it has done what it was told."""
ToWorker = Start | Job | MayCompile
FromWorker = Answer | Grammar

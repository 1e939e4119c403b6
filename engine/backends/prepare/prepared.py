"""What goes through a worker's pipe: msgpack behind a length of 4 bytes, big-endian."""

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
    """Which renderer a worker process loads: the model's own, or the synthetic engine's.

    `model` is the directory or hub id of the tokenizer. `template` goes before the model's own.
    `end_token_ids` end a turn beside those that the tokenizer's files name. `image_text` is the
    renderer's.
    """

    kind: Literal["chat", "synthetic"]
    model: str = ""
    template: str | None = None
    end_token_ids: list[int] = []
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    image_text: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a worker. `memory_bytes` is what it may allocate beyond its start.

    A worker that works on one request for longer than `seconds` ends itself. So does one whose
    grammar takes more than `grammar_seconds` of processor time: no other way ends a compilation. On
    the wall a compilation has `compile_seconds`.
    """

    spec: WorkerSpec
    description: Description
    memory_bytes: int
    seconds: float
    grammar_seconds: float
    compile_seconds: float


class Job(msgspec.Struct, frozen=True, tag="job"):
    """`body` is the client's JSON as it came. `days` are for templates that write the date."""

    kind: Kind
    body: bytes
    days: KnownDays | None = None


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """What a worker asks before it compiles a request's grammar, which may end the worker.

    `digest` is of what decides the grammar. `refusal` is the client's message where the grammar
    takes too much. An optional grammar is left out then, and the request is prepared without it.
    """

    digest: bytes
    refusal: str
    is_optional: bool = False


class MayCompile(msgspec.Struct, frozen=True, tag="may_compile"):
    """The answer to `Grammar`: go on, it is known to take too much, or not on this worker now."""

    verdict: Verdict


class Postponed(msgspec.Struct, frozen=True, tag="postponed"):
    """The request is to come again when another worker may compile the grammar of this digest."""

    digest: bytes


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """A rendered request. `request`, as JSON, lacks the prompt's texts: nobody reads them any more.

    It still has the tools' names and schemas, where calls are parsed, and what kinds of parts the
    last message has. `token_ids` are native 32-bit words. `unheld` are the strict tools whose calls
    no grammar holds, `folded` the segments that are told in the user's turn, `inexact` those
    breakpoints' segments whose end in the tokens lies before their text's end. A segment's `end` is
    floored to the engine's granularity. `dated` is the day
    that the template wrote; the longest of the breakpoints' own lifetimes is `own_seconds`.

    With `images`, in the order of their places, what computes says how many tokens each of them is:
    until then a segment's `end` is not floored. `begins` are the tokens in front of the texts of
    the request's documents. `keys` are the token ids by which content is known,
    where they are others.
    """

    request: bytes
    token_ids: bytes
    segments: list[Segment]
    names: list[HeldName]
    unheld: list[UnheldTool] = []
    folded: list[int] = []
    inexact: list[int] = []
    dated: DatedBeginning | None = None
    own_seconds: float = 0.0
    images: list[Image] = []
    begins: list[int] = []
    keys: bytes = b""


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """The answer to `POST /v1/count`. With `images` it is that of the packed `token_ids`."""

    reply: CountReply
    images: list[Image] = []
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

"""Which parts of a request's prompt need not be exact, and how that changes the prompt's plan.

There are three approximations. A part of a marked prefix is kept. A sibling's entry is read in a
marked prefix's place. A document's entry is read wherever the document stands.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from sys import maxsize

import msgspec
from msgspec.structs import replace

from engine.protocol import (
    KEEP_FIELD,
    MAX_DOCUMENTS,
    SIBLING_FIELD,
    Breakpoint,
    Document,
    Method,
    Prompt,
)
from gateway.base.errors import InvalidRequest
from gateway.prompt.names import DIGEST_BYTES, Prefix, Salts, segments_of
from gateway.prompt.slots import MarkersBroken, Slot
from gateway.prompt.wish import ApproximateMark

HEADER = "holdfast-approximate"
"""A request's header with an approximate mark, for clients that can write nothing into a marker.
Each answer that is not exact has it too."""
# The first byte of each method's salt in the chain of names. Nothing else in the chain begins so.
_KEEP = b"\x05"
_DOCUMENT = b"\x06"
_SIBLING = b"\x07"
_FIELD = re.compile(rf"{KEEP_FIELD}|{SIBLING_FIELD}|documents\[(\d{{1,6}})\]")
"""The beginning of an engine's message about an approximate part."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """One approximation that a request asks for."""

    # Its place in the request.
    path: str
    method: Method
    parameter: float


class Approximate(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one prompt that need not be exact: a breakpoint's prefix, or documents."""

    # The breakpoint whose prefix is kept in part, or for which a sibling's entry may be read.
    point: Breakpoint | None = None
    documents: list[Document] = []
    # Where each document begins and ends, in bytes of the prompt's content.
    document_bytes: list[tuple[int, int]] = []
    # One for each of the documents, or one for the breakpoint.
    demands: list[Demand] = []

    @property
    def header(self) -> str:
        """The value of the answer's header."""
        point = self.point
        if point is None:
            recomputed = sorted({document.recompute for document in self.documents})
            return f"blocks; recompute={','.join(map(str, recomputed))}"
        if point.sibling:
            return "sibling=true"
        return f"keep={point.keep:g}; scorer={point.scorer}"

    @property
    def salts(self) -> Salts:
        """What the prompt's names cover besides its content.

        A document is salted before its segment. A prefix of which a part is kept is salted behind
        its last segment. A prompt that may read a sibling's entry is salted before its first.
        """
        salts_before = {
            document.segment: _DOCUMENT + b"%a" % document.recompute for document in self.documents
        }
        salts_behind: Mapping[int, bytes] = {}
        point = self.point
        if point is not None and point.sibling:
            salts_before[0] = _SIBLING
        elif point is not None:
            salts_behind = {point.segment: _KEEP + f"{point.scorer} {point.keep}".encode()}
        return Salts(salts_before, salts_behind)

    @property
    def num_names(self) -> int:
        """How many of a request's names the documents take."""
        return len(self.documents)

    def is_meant(self, message: str) -> bool:
        """Whether an engine's message is about one of the demands."""
        return self._demand_of(message) is not None

    def in_request(self, message: str) -> str:
        """The message with the demand's place in the request. It must be about a demand
        (`is_meant`)."""
        demand = self._demand_of(message)
        match = _FIELD.match(message)
        assert demand is not None and match is not None
        return demand.path + message[match.end() :]

    def _demand_of(self, message: str) -> Demand | None:
        """The demand that an engine's message is about; None where it is about none."""
        match = _FIELD.match(message)
        if match is None:
            return None
        number = int(match[1] or 0)
        return self.demands[number] if number < len(self.demands) else None

    def can_hold(self, prefix: Prefix) -> bool:
        """Whether an engine can hold this prefix. An engine that compresses a prefix holds nothing
        that ends before the prefix does."""
        point = self.point
        if point is None or point.sibling:
            return True
        if prefix.name.characters is None:
            return prefix.name.segment >= point.segment
        return prefix.name.segment > point.segment

    def with_names(self, prompt: Prompt, scope: str, prefixes: Sequence[Prefix]) -> "Approximate":
        """A copy whose documents have their names and their places. `prefixes` are all prefixes of
        the prompt."""
        if not self.documents:
            return self
        documents, places = name_documents(prompt, scope, self.documents, prefixes)
        return replace(self, documents=documents, document_bytes=places)


def with_wishes(points: Sequence[Breakpoint], slots: Sequence[Slot]) -> list[Breakpoint]:
    """The breakpoints with the approximate marks of their slots. Raise MarkersBroken where several
    slots have one."""
    asking = [slot for slot in slots if isinstance(slot.approximate, ApproximateMark)]
    if len(asking) > 1:
        raise MarkersBroken(
            f"{asking[1].path}.cache_control.holdfast: one marker of a request may have it"
        )
    marked = list[Breakpoint]()
    for point in points:
        wish = slots[point.segment].approximate
        marked.append(wish.on(point) if isinstance(wish, ApproximateMark) else point)
    return marked


def with_header(
    header_mark: ApproximateMark, points: Sequence[Breakpoint], num_head: int
) -> list[Breakpoint]:
    """The breakpoints with the header's mark on one of them.

    The mark goes on the last breakpoint in the tools and the system prompt, which are the first
    `num_head` segments. If there is none, it goes on the first breakpoint of all. Breakpoints in
    the messages move as a conversation grows, so no later turn would read an entry that ends there.
    Raise InvalidRequest without a breakpoint, and where a marker has an approximate mark already.
    """
    if any(point.is_approximate for point in points):
        raise InvalidRequest(f"{HEADER}: a marker of the request says already what is kept")
    if not points:
        raise InvalidRequest(f"{HEADER}: nothing of this request is marked")
    heads = [place for place, point in enumerate(points) if point.segment < num_head]
    place = max(heads, default=0)
    marked = list(points)
    marked[place] = header_mark.on(points[place])
    return marked


def approximate_of(
    slots: Sequence[Slot], points: Sequence[Breakpoint], *, has_header: bool
) -> Approximate | None:
    """The parts of the slots' prompt that need not be exact; None where all must be. The documents
    have no names yet. Raise MarkersBroken where documents break a rule."""
    point = next((point for point in points if point.is_approximate), None)
    documents: list[Document] = []
    demands: list[Demand] = []
    if point is not None:
        field = "sibling" if point.sibling else "keep"
        path = f"{slots[point.segment].path}.cache_control.holdfast.{field}"
        if has_header:
            path = HEADER
        if point.keep is None:
            demands.append(Demand(path=path, method="sibling", parameter=maxsize))
        else:
            demands.append(Demand(path=path, method=point.scorer, parameter=point.keep))
    for segment, slot in enumerate(slots):
        document = slot.approximate
        if not isinstance(document, Document):
            continue
        path = f"{slot.path}.cache_control.holdfast.block"
        if point is not None:
            raise MarkersBroken(f"{path}: not beside `keep` or `sibling`")
        if len(documents) == MAX_DOCUMENTS:
            raise MarkersBroken(f"{path}: at most {MAX_DOCUMENTS} of a request")
        documents.append(replace(document, segment=segment))
        demands.append(Demand(path=path, method="blocks", parameter=document.recompute))
    if not demands:
        return None
    return Approximate(point=point, documents=documents, demands=demands)


def name_documents(
    prompt: Prompt, scope: str, documents: Sequence[Document], prefixes: Sequence[Prefix]
) -> tuple[list[Document], list[tuple[int, int]]]:
    """The documents with their names, and where each begins and ends, in bytes of content.

    A name covers the scope and the document's text alone. `prefixes` are all of the prompt's.
    """
    chain = blake2b(scope.encode(), digest_size=DIGEST_BYTES, person=b"document")
    ends = {name.segment: num_bytes for name, num_bytes in prefixes if name.characters is None}
    texts = [segment.text.encode() for segment in segments_of(prompt)]
    with_names: list[Document] = []
    places: list[tuple[int, int]] = []
    for document in documents:
        text = texts[document.segment]
        digest = chain.copy()
        digest.update(text)
        with_names.append(replace(document, name=digest.hexdigest()))
        end = ends[document.segment]
        places.append((end - len(text), end))
    return with_names, places

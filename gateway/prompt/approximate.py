"""What of a request's prompt may be anything else than exact, and what that changes of its plan.

Of a marked prefix a part is kept, or a sibling's entry may be read in its place. Or documents stand
in the prompt that are read wherever they stand.
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
"""Of a request whose client can put nothing into a marker, and of each answer that is not exact."""
# What the chain of names takes in, each behind a byte that nothing else there begins with.
_KEEP = b"\x05"
_DOCUMENT = b"\x06"
_SIBLING = b"\x07"
_FIELD = re.compile(rf"{KEEP_FIELD}|{SIBLING_FIELD}|documents\[(\d{{1,6}})\]")
"""What an engine's message about something of it begins with."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a request asks for."""

    # Where the request says so.
    path: str
    method: Method
    parameter: float


class Approximate(msgspec.Struct, frozen=True, kw_only=True):
    """What of one prompt may be no exact answer: a breakpoint's prefix, or documents."""

    # The breakpoint of whose prefix a part is kept, or a sibling's entry may be read.
    point: Breakpoint | None = None
    documents: list[Document] = []
    # Where in the bytes of the content each document begins and ends.
    document_bytes: list[tuple[int, int]] = []
    # The documents in order, or the one breakpoint.
    demands: list[Demand] = []

    @property
    def header(self) -> str:
        """What the answer's header says of it."""
        point = self.point
        if point is None:
            recomputed = sorted({document.recompute for document in self.documents})
            return f"blocks; recompute={','.join(map(str, recomputed))}"
        if point.sibling:
            return "sibling=true"
        return f"keep={point.keep:g}; scorer={point.scorer}"

    @property
    def salts(self) -> Salts:
        """What its names cover besides texts.

        A document is in the chain from its beginning. What is kept of a prefix is in it behind the
        segment that is marked so. That a sibling's entry may be read is in it from the first.
        """
        before = {
            document.segment: _DOCUMENT + b"%a" % document.recompute for document in self.documents
        }
        behind: Mapping[int, bytes] = {}
        point = self.point
        if point is not None and point.sibling:
            before[0] = _SIBLING
        elif point is not None:
            behind = {point.segment: _KEEP + f"{point.scorer} {point.keep}".encode()}
        return Salts(before, behind)

    @property
    def num_names(self) -> int:
        """How many names documents take, of those that a request may have."""
        return len(self.documents)

    def is_meant(self, message: str) -> bool:
        """Whether an engine's message is about something that was asked for."""
        return self._number_of(message) is not None

    def in_request(self, message: str) -> str:
        """The message by the place in the request. Something that was asked for must be meant."""
        number = self._number_of(message)
        match = _FIELD.match(message)
        assert number is not None and match is not None
        return self.demands[number].path + message[match.end() :]

    def _number_of(self, message: str) -> int | None:
        match = _FIELD.match(message)
        number = 0 if match is None else int(match[1] or 0)
        return None if match is None or number >= len(self.demands) else number

    def can_hold(self, prefix: Prefix) -> bool:
        """Whether an engine can hold this prefix: one that compresses a prefix holds nothing in
        front of its end."""
        point = self.point
        if point is None or point.sibling:
            return True
        is_inside = prefix.name.characters is not None
        return prefix.name.segment >= point.segment + is_inside

    def with_names(self, prompt: Prompt, scope: str, prefixes: Sequence[Prefix]) -> "Approximate":
        """With the documents' names, and where each stands. `prefixes` are all of the prompt's."""
        if not self.documents:
            return self
        documents, places = name_documents(prompt, scope, self.documents, prefixes)
        return replace(self, documents=documents, document_bytes=places)


def with_wishes(points: Sequence[Breakpoint], slots: Sequence[Slot]) -> list[Breakpoint]:
    """The breakpoints with what their slots' markers ask for. Raise MarkersBroken where several
    do."""
    asking = [slot for slot in slots if isinstance(slot.approximate, ApproximateMark)]
    if len(asking) > 1:
        raise MarkersBroken(
            f"{asking[1].path}.cache_control.holdfast: one marker of a request may have it"
        )
    wished = list[Breakpoint]()
    for point in points:
        wish = slots[point.segment].approximate
        wished.append(wish.asked_at(point) if isinstance(wish, ApproximateMark) else point)
    return wished


def with_header(
    header_mark: ApproximateMark, points: Sequence[Breakpoint], num_head: int
) -> list[Breakpoint]:
    """The header's wish on one breakpoint: the last of the `num_head` segments of tools and system
    prompt, or the first of all where none is there.

    Those behind it move as a conversation grows: an entry that ends at one would be read by no
    later turn. Raise InvalidRequest where there is nothing to ask it of.
    """
    if any(point.is_approximate for point in points):
        raise InvalidRequest(f"{HEADER}: a marker of the request says already what is kept")
    if not points:
        raise InvalidRequest(f"{HEADER}: nothing of this request is marked")
    heads = [place for place, point in enumerate(points) if point.segment < num_head]
    place = max(heads, default=0)
    wished = list(points)
    wished[place] = header_mark.asked_at(wished[place])
    return wished


def approximate_of(
    slots: Sequence[Slot], points: Sequence[Breakpoint], *, has_header: bool
) -> Approximate | None:
    """What is asked of the prompt of these slots, its documents without their names; None where all
    is to be exact. Raise MarkersBroken where documents break a rule."""
    point = next((point for point in points if point.is_approximate), None)
    documents: list[Document] = []
    demands: list[Demand] = []
    if point is not None:
        path = f"{slots[point.segment].path}.cache_control.holdfast"
        path = f"{path}.{'sibling' if point.sibling else 'keep'}"
        where = HEADER if has_header else path
        if point.keep is None:
            demands.append(Demand(path=where, method="sibling", parameter=maxsize))
        else:
            demands.append(Demand(path=where, method=point.scorer, parameter=point.keep))
    for segment, slot in enumerate(slots):
        document = slot.approximate
        if not isinstance(document, Document):
            continue
        where = f"{slot.path}.cache_control.holdfast.block"
        if point is not None:
            raise MarkersBroken(f"{where}: not beside `keep` or `sibling`")
        if len(documents) == MAX_DOCUMENTS:
            raise MarkersBroken(f"{where}: at most {MAX_DOCUMENTS} of a request")
        documents.append(replace(document, segment=segment))
        demands.append(Demand(path=where, method="blocks", parameter=document.recompute))
    if not demands:
        return None
    return Approximate(point=point, documents=documents, demands=demands)


def name_documents(
    prompt: Prompt, scope: str, documents: Sequence[Document], prefixes: Sequence[Prefix]
) -> tuple[list[Document], list[tuple[int, int]]]:
    """The documents with their names, and where in the bytes of the prompt's content each stands.

    A name covers the scope and the document's text alone. `prefixes` are all of the prompt's.
    """
    chain = blake2b(scope.encode(), digest_size=DIGEST_BYTES, person=b"document")
    ends = {name.segment: num_bytes for name, num_bytes in prefixes if name.characters is None}
    texts = [segment.text.encode() for segment in segments_of(prompt)]
    named: list[Document] = []
    places: list[tuple[int, int]] = []
    for document in documents:
        text = texts[document.segment]
        digest = chain.copy()
        digest.update(text)
        named.append(replace(document, name=digest.hexdigest()))
        end = ends[document.segment]
        places.append((end - len(text), end))
    return named, places

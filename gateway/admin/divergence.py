"""Why a prompt missed: where it first differs from an earlier one, and what that cost."""

from typing import Annotated

import msgspec
from litestar.params import FromPath, QueryParameter

from gateway.admin.controller import AdminController, Deps, view
from gateway.admin.structs.usage import Section, Turn, TurnDivergence
from gateway.base.errors import NotFound
from gateway.http.auth import AdminRequest
from gateway.http.services import Services
from gateway.ledger.reads import turns as queries_turns
from gateway.prompt.fingerprint import Divergence, Fingerprint, compare, shared_bytes, unpack

# How many earlier turns are compared where the query names none.
_MAX_CANDIDATES = 200
# By how much the blocks of two prompts may differ in length and still be taken for two versions of
# one: a date, a name or an id in a block is shorter.
_ALIKE_BYTES, _ALIKE_SHARE = 32, 0.02


class DivergenceController(AdminController):
    path = "/admin/v1/turns/{turn_id:str}/divergence"

    @view("/", "getDivergence", "Where a turn's prompt first differs from an earlier one's.")
    async def divergence(
        self,
        request: AdminRequest,
        turn_id: FromPath[str],
        services: Deps,
        earlier: Annotated[
            str | None, QueryParameter(name="from", min_length=1, max_length=64)
        ] = None,
    ) -> TurnDivergence:
        """Compare two turns of the ledger, whatever their clients asked for."""
        own = request.user.workspace
        turn, packed = await _turn(services, turn_id, own)
        later = unpack(packed)
        if earlier is None:
            found = await _nearest(services, turn, later)
            if found is None:
                return TurnDivergence(turn=turn_id)
            before_id, before = found
        else:
            before_id, before = earlier, unpack((await _turn(services, earlier, own))[1])
        return _report(services, turn, later, before_id, before)


async def _turn(services: Services, turn_id: str, workspace: str | None) -> tuple[Turn, bytes]:
    ledger = services.queries.ledger
    turn = await queries_turns.one(ledger, turn_id[:64], workspace)
    packed = None if turn is None else await services.queries.fingerprint(turn.id)
    if turn is None or packed is None:
        raise NotFound(f"turn: no fingerprint of `{turn_id[:64]}`")
    return turn, packed


async def _nearest(
    services: Services, turn: Turn, later: Fingerprint
) -> tuple[str, Fingerprint] | None:
    """The earlier turn that shares the longest prefix with this one; of equals the latest.

    Fingerprints of short prompts have few points, so two that begin alike may share none. Without
    a shared one the latest prompt is taken whose tools and system blocks are as many and as long.
    Any other prompt explains nothing, and is not compared.
    """
    best: tuple[int, str, Fingerprint] | None = None
    alike: tuple[str, Fingerprint] | None = None
    for turn_id, packed in await queries_turns.earlier(
        services.queries.ledger, turn, _MAX_CANDIDATES
    ):
        candidate = unpack(packed)
        shared = shared_bytes(candidate, later)
        if shared and (best is None or shared > best[0]):
            best = shared, turn_id, candidate
        if alike is None and _is_alike(candidate, later):
            alike = turn_id, candidate
    return alike if best is None else (best[1], best[2])


def _is_alike(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether the tools and system blocks of two prompts are as many, each about as long.

    The messages only have to be as many: they are what a client asks anew. Of a prompt that is
    messages alone, all but the last block are compared; a single block is like no other.
    """
    shapes = [(f.num_tools, f.num_system, f.points[-1].segment) for f in (one, other)]
    fixed = (one.num_tools + one.num_system) or one.points[-1].segment
    if not fixed or shapes[0] != shapes[1]:
        return False
    pairs = zip(_lengths(one, fixed), _lengths(other, fixed), strict=False)
    return all(abs(a - b) <= _ALIKE_BYTES + _ALIKE_SHARE * max(a, b) for a, b in pairs)


def _lengths(fingerprint: Fingerprint, count: int) -> list[int]:
    """The bytes up to the end of each of the first `count` segments whose end has a point."""
    ends = {p.segment: p.num_bytes for p in fingerprint.points if p.characters is None}
    return [ends[segment] for segment in range(count) if segment in ends]


def _report(
    services: Services, turn: Turn, later: Fingerprint, before_id: str, before: Fingerprint
) -> TurnDivergence:
    found, shared = compare(before, later), shared_bytes(before, later)
    report = TurnDivergence(
        turn=turn.id,
        earlier=before_id,
        shared_tokens=_tokens(before, shared),
        earlier_tokens=before.num_tokens or None,
    )
    if found is None:
        return report
    section, block = _place(before, found)
    return msgspec.structs.replace(
        report,
        kind=found.kind,
        segment=found.segment,
        missed_tokens=found.missed_tokens,
        section=section,
        block=block,
        characters=found.characters,
        missed_nano=_lost(services, turn, found.missed_tokens) if shared else None,
    )


def _tokens(fingerprint: Fingerprint, num_bytes: int) -> int | None:
    """So many bytes of this prompt in tokens; None where its tokens were never counted."""
    if not (fingerprint.num_tokens and fingerprint.num_bytes):
        return None
    return round(fingerprint.num_tokens * num_bytes / fingerprint.num_bytes)


def _place(before: Fingerprint, found: Divergence) -> tuple[Section | None, int | None]:
    if found.segment is None:
        return None, None
    # A block that was added at a section's end belongs to that section, as its next block.
    if found.kind == "tools_changed" or found.segment < before.num_tools:
        return "tools", found.segment
    inside = found.segment - before.num_tools
    if found.kind == "system_changed" or inside < before.num_system:
        return "system", inside
    return "messages", inside - before.num_system


def _lost(services: Services, turn: Turn, missed_tokens: int | None) -> int | None:
    """What reading those tokens would have saved this turn, at its own price."""
    price = services.prices.own.with_id(turn.price or "")
    if price is None or missed_tokens is None:
        return None
    paid = turn.input_tokens + turn.written_tokens
    rates = price.rates_above(turn.prompt_tokens - 1)
    return min(missed_tokens, paid) * (rates.input - rates.read)

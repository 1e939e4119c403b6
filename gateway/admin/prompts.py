"""One turn's prompt: why it missed, its words, and the turns beside it."""

import asyncio
import dataclasses
from typing import Annotated

import msgspec
from litestar.params import FromPath, QueryParameter

from engine.protocol import Prompt, TextPart
from gateway.admin.controller import (
    AdminController,
    Deps,
    removal,
    view,
)
from gateway.base.errors import Forbidden, GatewayError, NotFound
from gateway.http.auth import AdminRequest
from gateway.http.services import Services
from gateway.ledger.reads import turns as queries_turns
from gateway.prompt.difference import Difference, first_difference
from gateway.prompt.fingerprint import (
    STORED_STEP,
    Divergence,
    Fingerprint,
    compare,
    conversation,
    first_differing_point,
    shared_bytes,
    unpack,
)
from gateway.structs import usage as structs
from gateway.structs.misses import SECTION_OF, Section

# How many earlier turns are compared if the query names no turn.
_MAX_CANDIDATES = 200
# How many turns on each side of a turn are searched for its conversation.
_MAX_BESIDE = 300
BEGINNING_CHARACTERS = 80
"""The most characters of the first words of a prompt."""
# The characters of each text that are searched for its first words.
_READ_CHARACTERS = 1000
# Two versions of one block may differ in length by this many bytes, and by this share of the longer
# one. A date, a name or an id is shorter than the bytes.
_ALIKE_BYTES = 32
_ALIKE_SHARE = 0.02


async def turn_of(services: Services, turn_id: str, workspace: str | None) -> structs.Turn:
    turn = await queries_turns.one(services.queries.ledger, turn_id[:64], workspace)
    if turn is None:
        raise NotFound(f"turn: `{turn_id[:64]}`")
    return turn


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
    ) -> structs.TurnDivergence:
        """Compare two turns of the ledger, whatever their clients asked for."""
        workspace = request.user.workspace
        turn, packed = await _turn(services, turn_id, workspace)
        fingerprint = unpack(packed)
        if earlier is None:
            nearest = await _nearest(services, turn, fingerprint)
            if nearest is None:
                return structs.TurnDivergence(turn=turn_id)
            earlier_id, earlier_print = nearest
        else:
            earlier_id = earlier
            _, packed_before = await _turn(services, earlier, workspace)
            earlier_print = unpack(packed_before)
        tokens = earlier_print.num_tokens
        difference = compare(earlier_print, fingerprint)
        exact = None
        if difference is not None and difference.segment is not None:
            exact = await _exact(services, turn, earlier_id)
        if exact is not None and difference is not None:
            difference = dataclasses.replace(
                difference,
                segment=exact.segment,
                characters=exact.characters,
                missed_tokens=max(round(tokens * (1 - exact.share)), 1),
            )
        shared = (
            shared_bytes(earlier_print, fingerprint) / earlier_print.num_bytes
            if earlier_print.num_bytes
            else 0.0
        )
        if exact is not None:
            shared = exact.share
        report = structs.TurnDivergence(
            turn=turn.id,
            earlier=earlier_id,
            shared_tokens=round(tokens * shared) if tokens and earlier_print.num_bytes else None,
            is_exact=exact is not None,
            earlier_tokens=tokens or None,
        )
        if difference is None:
            return msgspec.structs.replace(report, is_exact=True)
        if exact is None:
            report = _bounded(report, earlier_print, fingerprint, difference)
        section, block = _place_of(earlier_print, difference)
        # How much this turn would have saved by reading those tokens, at its own price.
        price = services.prices.own.with_id(turn.price or "")
        missed_nano = None
        if shared and price is not None and difference.missed_tokens is not None:
            rates = price.rates_above(turn.prompt_tokens - 1)
            missed_tokens = min(difference.missed_tokens, turn.input_tokens + turn.written_tokens)
            missed_nano = missed_tokens * (rates.input - rates.read)
        divergence = {
            name: getattr(difference, name) for name in ("kind", "segment", "missed_tokens")
        }
        divergence |= {"section": section, "block": block, "characters": difference.characters}
        return msgspec.structs.replace(report, **divergence, missed_nano=missed_nano)


async def _exact(services: Services, turn: structs.Turn, earlier: str) -> Difference | None:
    """Where the texts of two turns first differ. None where a text is not kept, or is too large to
    open."""
    contents = services.turns.content_writer
    try:
        before, _ = await contents.read(turn.workspace, earlier)
        after, _ = await contents.read(turn.workspace, turn.id)
    except GatewayError:
        return None

    def difference() -> Difference | None:
        prompts = (msgspec.convert(content.prompt, Prompt) for content in (before, after))
        return first_difference(*prompts)

    return await asyncio.to_thread(difference)


def _bounded(
    report: structs.TurnDivergence,
    earlier_print: Fingerprint,
    fingerprint: Fingerprint,
    divergence: Divergence,
) -> structs.TurnDivergence:
    """The report with the precision of places, and with a place that is behind the difference."""
    report = msgspec.structs.replace(report, grid_characters=STORED_STEP)
    point = first_differing_point(earlier_print, fingerprint)
    if point is None:
        return report
    characters_below = None
    if point.segment == divergence.segment and point.characters is not None:
        characters_below = point.characters
    tokens = earlier_print.num_tokens
    return msgspec.structs.replace(
        report,
        characters_below=characters_below,
        shared_tokens_below=round(tokens * point.num_bytes / earlier_print.num_bytes)
        if tokens
        else None,
    )


async def _turn(
    services: Services, turn_id: str, workspace: str | None
) -> tuple[structs.Turn, bytes]:
    turn = await turn_of(services, turn_id, workspace)
    packed = await services.queries.fingerprint(turn.id)
    if packed is None:
        raise NotFound(f"turn: no fingerprint of `{turn_id[:64]}`")
    return turn, packed


async def _nearest(
    services: Services, turn: structs.Turn, fingerprint: Fingerprint
) -> tuple[str, Fingerprint] | None:
    """The earlier turn that shares the longest prefix with this one. If several do, it is the
    latest of them.

    Short prompts have few points, and may share none. Then it is the latest turn for which
    `_is_alike` is true, because any other prompt explains nothing. None without such a turn.
    """
    best: tuple[int, str, Fingerprint] | None = None
    alike: tuple[str, Fingerprint] | None = None
    for turn_id, packed in await queries_turns.earlier(
        services.queries.ledger, turn, _MAX_CANDIDATES
    ):
        candidate = unpack(packed)
        shared = shared_bytes(candidate, fingerprint)
        if shared and (best is None or shared > best[0]):
            best = shared, turn_id, candidate
        if alike is None and _is_alike(candidate, fingerprint):
            alike = turn_id, candidate
    return alike if best is None else (best[1], best[2])


def _is_alike(earlier: Fingerprint, other: Fingerprint) -> bool:
    """Whether two prompts have the same numbers of tools, system blocks and messages, and whether
    their tools and system blocks are about as long. A prompt with messages alone is compared by
    all its blocks but the last."""
    shapes = [(f.num_tools, f.num_system, f.points[-1].segment) for f in (earlier, other)]
    fixed = (earlier.num_tools + earlier.num_system) or earlier.points[-1].segment
    if not fixed or shapes[0] != shapes[1]:
        return False
    pairs = zip(_lengths(earlier, fixed), _lengths(other, fixed), strict=False)
    return all(abs(a - b) <= _ALIKE_BYTES + _ALIKE_SHARE * max(a, b) for a, b in pairs)


def _lengths(fingerprint: Fingerprint, count: int) -> list[int]:
    """The bytes up to the end of each of the first `count` segments whose end has a point."""
    ends = {p.segment: p.num_bytes for p in fingerprint.points if p.characters is None}
    return [ends[segment] for segment in range(count) if segment in ends]


def _place_of(
    fingerprint: Fingerprint, divergence: Divergence
) -> tuple[Section | None, int | None]:
    """The section of a divergence, and the number of its block there. A block that was added at a
    section's end is that section's next block."""
    place = divergence.segment
    if place is None:
        return None, None
    section = SECTION_OF[divergence.kind]
    if section == "tools" or place < fingerprint.num_tools:
        return "tools", place
    place -= fingerprint.num_tools
    if section == "system" or place < fingerprint.num_system:
        return "system", place
    return "messages", place - fingerprint.num_system


async def _readable(request: AdminRequest, services: Services, turn_id: str) -> structs.Turn:
    """The turn, for a viewer who may read its contents. Raise Forbidden for others."""
    if request.user.workspace is None and not request.user.may_change:
        raise Forbidden("what people wrote needs a key of the workspace or of scope `admin`")
    return await turn_of(services, turn_id, request.user.workspace)


def first_words(prompt: Prompt) -> str:
    """The beginning of a prompt's text, in one line; empty for a prompt without a text."""
    texts = [prompt.text or "", *(block.text for block in prompt.system)]
    for message in prompt.messages:
        texts += [part.text for part in message.parts if isinstance(part, TextPart)]
    for text in texts:
        words = " ".join(text[:_READ_CHARACTERS].split())
        if words:
            return words[:BEGINNING_CHARACTERS]
    return ""


class ContentController(AdminController):
    path = "/admin/v1/turns/{turn_id:str}/content"

    @view("/", "getContent", "The prompt and the answer of a turn, where its workspace keeps them.")
    async def content(
        self, request: AdminRequest, turn_id: FromPath[str], services: Deps
    ) -> structs.TurnContent:
        """For keys of the workspace and for those of scope `admin`."""
        turn = await _readable(request, services, turn_id)
        body, until_ms = await services.turns.content_writer.read(turn.workspace, turn.id)
        return structs.TurnContent(
            turn=turn.id, until_ms=until_ms, prompt=body.prompt, answer=body.answer
        )

    @view("/beginning", "getBeginning", "The first words of a turn's prompt, where it is kept.")
    async def beginning(
        self, request: AdminRequest, turn_id: FromPath[str], services: Deps
    ) -> structs.TurnBeginning:
        """For keys of the workspace and for those of scope `admin`, as for the whole content."""
        turn = await _readable(request, services, turn_id)
        body, _ = await services.turns.content_writer.read(turn.workspace, turn.id)
        prompt = await asyncio.to_thread(msgspec.convert, body.prompt, Prompt)
        return structs.TurnBeginning(turn=turn.id, text=first_words(prompt))

    @removal("/", "deleteContent", "Delete what is kept of a turn's prompt and answer.")
    async def remove(self, turn_id: FromPath[str], services: Deps) -> structs.Turn:
        """The turn's counts stay."""
        turn = await turn_of(services, turn_id, None)
        await services.turns.content_writer.remove(turn.id)
        return turn


class ConversationController(AdminController):
    path = "/admin/v1/turns/{turn_id:str}/conversation"

    @view("/", "getConversation", "The turns of a turn's conversation, in order.")
    async def conversation(
        self, request: AdminRequest, turn_id: FromPath[str], services: Deps
    ) -> list[structs.Turn]:
        """Each prompt of a conversation begins with the whole prompt before it.

        The key's nearest 300 turns before this turn and after it are searched. On each side they
        must be among the workspace's nearest 5,000.
        """
        ledger = services.queries.ledger
        turn, _ = await _turn(services, turn_id, request.user.workspace)
        beside = await queries_turns.around(ledger, turn, _MAX_BESIDE)

        def places() -> list[int]:
            prompts = [unpack(packed) for _, packed in beside]
            return conversation(prompts, [prompt for prompt, _ in beside].index(turn.id))

        ids = [beside[place][0] for place in await asyncio.to_thread(places)]
        return await queries_turns.with_ids(ledger, ids)

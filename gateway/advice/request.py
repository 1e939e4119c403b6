"""Advice for single requests, from their structure and their text. Pure."""

import re
from collections.abc import Iterator, Sequence

import msgspec

from engine.protocol import TextPart
from gateway.admin.structs.advice import Block, Finding, RequestAdvice, StreamAdvice
from gateway.advice.observation import Observation
from gateway.advice.pasted import Pasted, as_messages, marked, turn_id
from gateway.prompt.names import SYSTEM, TOOL

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_SUSPECTS = {
    "an id": re.compile(
        r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\b[0-9a-f]{16,64}\b",
        re.IGNORECASE,
    ),
    "a time": re.compile(r"\b\d{1,2}:\d{2}:\d{2}\b|\b1[5-9]\d{8}(?:\d{3})?\b"),
    "a date": re.compile(
        rf"\b20\d\d-[01]\d-[0-3]\d\b|\b(?:{_MONTHS}) \d{{1,2}},? 20\d\d\b"
        rf"|\b\d{{1,2}} (?:{_MONTHS}) 20\d\d\b"
    ),
}
_SEARCHED_CHARACTERS = 65_536
_MAX_SUSPECTS = 10
_MAX_BLOCKS = 200


def advise_request(pasted: Pasted, turn: Observation, min_tokens: int) -> RequestAdvice:
    ttls = dict(turn.marks)
    slots = pasted.plan.slots
    before = [0, *turn.tokens]
    blocks = [
        Block(
            path=slots[segment].path,
            tokens=turn.tokens[place] - before[place],
            marker=ttls.get(place),
        )
        for place, segment in enumerate(turn.places[:_MAX_BLOCKS])
    ]
    end = turn.carrier(turn.prefix_at(turn.head - 1)) if turn.head else -1
    findings = [*_broken(pasted), *_short(pasted, turn, min_tokens)]
    suspects = list(_suspects(pasted, turn, min_tokens))
    places: dict[int, str] = {}
    if end >= 0 and turn.tokens[end] >= min_tokens:
        places[turn.places[end]] = "5m"
    last = turn.carrier(len(turn.places) - 1)
    if turn.answer >= 0 and turn.tokens[last] >= min_tokens:
        places[turn.places[last]] = "5m"
    if not turn.marks and places:
        findings.append(_unmarked(pasted, turn, end if end >= 0 else last))
    findings += suspects
    return RequestAdvice(
        dialect=pasted.dialect,
        tokens=turn.total,
        blocks=blocks,
        findings=findings,
        marked=marked(pasted, places) if places else None,
        body=pasted.body,
        as_messages=as_messages(pasted),
    )


def with_own_paths(advice: StreamAdvice, read: Sequence[Pasted]) -> StreamAdvice:
    """The advice with each finding's block called as its request's own dialect calls it.

    `read` are the requests of the stream, in order.
    """
    numbers = {turn_id(number): number for number in range(len(read))}
    findings = []
    for finding in advice.findings:
        section, _, index = finding.path.partition(".")
        if index and finding.turns:
            plan = read[numbers[finding.turns[0]]].plan
            start = {"tools": 0, "system": len(plan.prompt.tools)}.get(
                section, len(plan.prompt.tools) + len(plan.prompt.system)
            )
            path = plan.slots[start + int(index)].path
            finding = msgspec.structs.replace(finding, path=path)
        findings.append(finding)
    return msgspec.structs.replace(advice, findings=findings)


def _broken(pasted: Pasted) -> Iterator[Finding]:
    if pasted.broken is not None:
        yield Finding(
            kind="invalid",
            path="cache_control",
            text=pasted.broken,
            change="Mark four blocks at most, those with the longer TTL first.",
            tokens=0,
            multiples=0.0,
        )


def _short(pasted: Pasted, turn: Observation, min_tokens: int) -> Iterator[Finding]:
    for place, _ in turn.marks:
        if turn.tokens[place] < min_tokens:
            yield Finding(
                kind="too_short",
                path=pasted.plan.slots[turn.places[place]].path,
                text=f"The prefix up to this marker has about {turn.tokens[place]:,} tokens. The"
                f" shortest that is held has {min_tokens:,}.",
                change="Mark a longer prefix, or leave the marker out.",
                tokens=turn.tokens[place],
                multiples=0.0,
            )


def _unmarked(pasted: Pasted, turn: Observation, place: int) -> Finding:
    tokens = turn.tokens[place]
    return Finding(
        kind="unmarked",
        path=pasted.plan.slots[turn.places[place]].path,
        text=f"Nothing is marked. About {tokens:,} tokens up to this block could be held: each"
        f" request that begins with them again within the TTL saves {tokens * 0.9:,.0f} input"
        f" tokens' worth, and the write costs {tokens * 0.25:,.0f} once.",
        change="Mark this block.",
        tokens=tokens,
        multiples=round(tokens * 0.65, 1),
    )


def _suspects(pasted: Pasted, turn: Observation, min_tokens: int) -> Iterator[Finding]:
    """Texts in the shared part that look as if they changed from request to request."""
    found = 0
    for segment, text in _texts(pasted, turn):
        place = turn.prefix_at(segment)
        if place < 0:
            continue
        before = turn.tokens[place - 1] if place else 0
        size = turn.tokens[place] - before
        for what, pattern in _SUSPECTS.items():
            match = pattern.search(text)
            if match is None:
                continue
            at = before + round(size * match.start() / max(len(text), 1))
            lost = turn.tokens[-1] - at
            if lost < min_tokens or found >= _MAX_SUSPECTS:
                continue
            found += 1
            yield Finding(
                kind="suspect",
                path=pasted.plan.slots[segment].path,
                text=f"At character {match.start():,} stands what looks like {what}. If it changes"
                f" from request to request, none of the {lost:,} tokens from there on can be read.",
                change="Put it into the last user message.",
                tokens=lost,
                multiples=round(lost * 0.9, 1),
            )
            break


def _texts(pasted: Pasted, turn: Observation) -> Iterator[tuple[int, str]]:
    """Tools, system blocks, and the first message where others follow."""
    prompt = pasted.plan.prompt
    kinds = [kind.lower() for kind in turn.kinds]
    for index, tool in enumerate(prompt.tools):
        assert kinds[index] == TOOL
        yield index, (tool.description or "")[:_SEARCHED_CHARACTERS]
    for index, block in enumerate(prompt.system):
        assert kinds[turn.num_tools + index] == SYSTEM
        yield turn.num_tools + index, block.text[:_SEARCHED_CHARACTERS]
    if len(prompt.messages) > 1:
        yield from _of_first(prompt.messages[0].parts, turn.head)


def _of_first(parts: Sequence[object], head: int) -> Iterator[tuple[int, str]]:
    for index, part in enumerate(parts):
        if isinstance(part, TextPart):
            yield head + index, part.text[:_SEARCHED_CHARACTERS]

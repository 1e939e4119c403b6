"""Near-duplicate prefixes of one workspace: tools and system blocks that a normalisation makes
equal. Pure.

Near-duplicates are found by digests, over all keys. If the caller has the texts of kept prompts,
these show what differs. Otherwise the times of the changes show it. Prefixes that no normalisation
makes equal are not reported. If no text is known, the report says so. The savings are what the
contract's cache (`cache.py`) would read in addition if the prefixes had one name.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from gateway.advice.cache import Cache, Sums
from gateway.advice.faults import difference_at, timed
from gateway.advice.observation import Mark, Observation
from gateway.advice.placements import Place, Placement
from gateway.advice.stream import amount, prefill_rate
from gateway.prompt.sketch import overlap
from gateway.structs.advice import DuplicateKind, NearDuplicate

MAX_GROUPS = 10
"""The most groups of one workspace and model: those with the most tokens."""
MAX_HEADS = 5_000
"""The most prefixes of one workspace and model that are compared. Later ones are left out."""
MAX_TEXTS = 6
"""The most prefixes of a group that are compared by their texts."""
_MAX_CHARACTERS = 1_000_000
_MAX_TURNS_NAMED = 5
# The least share of pieces that two versions of a text have in common: 9 of 12. A changed piece
# differs, and may take the place of another piece.
_ALIKE = 0.75
# The least share of a prefix's tokens that two versions of the prefix have in common.
_MOSTLY = 0.8
_SHORT_TOKENS = 40
_FEW = 3
_HEAD = Placement("shared_5m", Place("system", -1), "5m")
_DAY = r"(?:\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,? )?"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]{0,6}"
_NORMALISATIONS: dict[DuplicateKind, re.Pattern[str]] = {
    "date": re.compile(
        rf"{_DAY}(?:\b20\d\d-[01]\d-[0-3]\d(?!\d)|\b{_MONTH} \d{{1,2}},? 20\d\d\b"
        rf"|\b\d{{1,2}} {_MONTH} 20\d\d\b)"
    ),
    "time": re.compile(
        r"(?<!\d)[T ]?\d{1,2}:\d\d(?::\d\d(?:\.\d{1,9})?)?(?!\d)(?: ?[AP]M|Z|[+-]\d\d:?\d\d)?"
        r"|\b1[5-9]\d{8}(?:\d{3})?\b"
    ),
    "nonce": re.compile(
        r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
        r"|\b(?=[A-Za-z_]{0,64}\d)(?=\d{0,64}[A-Za-z_])\w{8,64}\b|\b\d{9,64}\b"
    ),
    "whitespace": re.compile(r"\s+"),
}
"""The normalisations, in the order in which they are applied. They make two texts equal where what
they leave of both is the same."""
_WORDS: dict[DuplicateKind, tuple[str, str]] = {
    "tool_order": ("the order of tools", "Sort the tools by name before sending them."),
    "key_order": ("the order of keys", "Write JSON with its keys in a fixed order."),
    "date": ("a date", "Put the date into the last user message."),
    "time": ("a time", "Put the time into the last user message."),
    "nonce": ("an id", "Leave the id out, or put it into the last user message."),
    "whitespace": ("white space", "Write the text with the same white space always."),
    "varying_text": (
        "a part of a text (nothing is kept of the prompts: a date, an id and white space can't be"
        " told apart)",
        "Put what changes behind what stays the same.",
    ),
}
"""For each kind: what differs, and the normalisation."""


@dataclass(slots=True)
class Group:
    """The turns whose prefixes are nearly the same as the prefix of the `first` turn."""

    first: Observation
    # In order of time.
    turns: list[Observation] = field(default_factory=list)
    # The first turn with each prefix, by the prefix's name.
    heads: dict[bytes, Observation] = field(default_factory=dict)
    # What differs first, as far as digests show it.
    kind: DuplicateKind = "varying_text"
    # The path of the block that differs first; empty while no prefix differs.
    path: str = ""
    # The number of that block among tools and system blocks.
    place: int = 0

    @property
    def others(self) -> list[Observation]:
        """The first turn with each prefix, without the group's first turn."""
        return list(self.heads.values())[1:]

    @property
    def compared(self) -> list[str]:
        """The ids of the turns whose texts are compared. The group's first turn comes first."""
        return [turn.id for turn in self.heads.values()][:MAX_TEXTS]


def find_groups(turns: Iterable[Observation], min_tokens: int) -> list[Group]:
    """The groups of near-duplicates, those with the most tokens first. `turns` are a workspace's
    turns of one model, in order of time. Prefixes with fewer than `min_tokens` are left out."""
    groups: list[Group] = []
    by_head: dict[bytes, Group] = {}
    by_feature: dict[bytes, Group] = {}
    for turn in turns:
        head = _head(turn)
        is_new = head not in by_head and len(by_head) >= MAX_HEADS
        if head is None or is_new or turn.tokens[turn.prefix_at(turn.head - 1)] < min_tokens:
            continue
        group = by_head.get(head)
        if group is None:
            features = _features(turn)
            likely = _likely_group(features, by_feature)
            group = likely if likely is not None and _joins(likely, turn) else None
            if group is None:
                group = Group(turn)
                groups.append(group)
                by_feature.update(dict.fromkeys(features, group))
            by_head[head] = group
            group.heads[head] = turn
        group.turns.append(turn)
    near = [group for group in groups if len(group.heads) > 1]
    return sorted(near, key=lambda group: -sum(t.total for t in group.turns))[:MAX_GROUPS]


def _features(turn: Observation) -> set[bytes]:
    """The digests of a turn's tools and system blocks that near-duplicates may have in common."""
    features = set[bytes]()
    for segment in turn.segments[: turn.head]:
        features.add(segment.digest)
        features.update(segment.pieces)
        if segment.unordered is not None:
            features.add(segment.unordered)
    return features


def _likely_group(features: Iterable[bytes], by_feature: Mapping[bytes, Group]) -> Group | None:
    """The group that has the most of these features."""
    groups = [by_feature[feature] for feature in features if feature in by_feature]
    by_id = {id(group): group for group in groups}
    votes = Counter(map(id, groups))
    return by_id[votes.most_common(1)[0][0]] if votes else None


def near_duplicate(
    group: Group, min_tokens: int, prompts: Mapping[str, Any]
) -> NearDuplicate | None:
    """The report of a group. None where a text shows that no normalisation makes the prefixes
    equal, or where equal prefixes would save nothing. `prompts` are the kept prompts by turn id."""
    kinds = _kinds_by_digests(group)
    texts = _texts_of(group, prompts)
    first_texts = texts.pop(group.first.id, None)
    is_compared = first_texts is not None and bool(texts)
    if first_texts is not None and texts:
        group, kinds = _compared(group, first_texts, texts)
    if len(group.heads) < 2 or not kinds:
        return None
    replay = simulated(group, min_tokens)
    rate = prefill_rate(group.turns)
    saves = amount(replay.before, replay.after, rate)
    if saves.multiples <= 0:
        return None
    first = group.first
    num_keys = len({turn.key for turn in group.turns})
    size = first.tokens[first.prefix_at(first.head - 1)]
    about = f"Workspace {first.workspace} with {first.model}: " if first.workspace else ""
    marked = "" if _is_marked(group) else ", with a 5-minute marker behind it"
    return NearDuplicate(
        kind=kinds[0],
        path=group.path,
        text=f"{about}{len(group.heads):,} prefixes of about {size:,} tokens, of {num_keys:,}"
        f" key{'s' * (num_keys > 1)}, differ in {' and '.join(_WORDS[kind][0] for kind in kinds)}."
        f" As one they would have saved the price of {saves.multiples:,.0f} input tokens{marked}.",
        change=" ".join(_WORDS[kind][1] for kind in kinds),
        tokens=saves.tokens,
        multiples=saves.multiples,
        nano=saves.nano,
        prefill_seconds=saves.prefill_seconds,
        num_turns=len(group.turns),
        turns=[turn.id for turn in group.others][:_MAX_TURNS_NAMED],
        earlier=[first.id],
        workspace=first.workspace,
        model=first.model,
        num_prefixes=len(group.heads),
        is_compared=is_compared,
        by_key={key: amount(before, after, rate) for key, (before, after) in replay.by_key.items()},
    )


def _kinds_by_digests(group: Group) -> list[DuplicateKind]:
    """What differs, as the digests and the times of their changes show it."""
    if group.kind == "varying_text" and len(group.heads) >= _FEW:
        when = timed([(turn.at_ms, turn.segment_digests[group.place]) for turn in group.turns])
        if when in ("hour", "minute"):
            return ["time"]
        if when == "date" or when == "nonce":
            return [when]
    return [group.kind]


def _texts_of(group: Group, prompts: Mapping[str, Any]) -> dict[str, list[str]]:
    """The texts of the compared turns whose prompts are kept and not too long, by turn id."""
    texts = dict[str, list[str]]()
    for turn_id in group.compared:
        if turn_id in prompts:
            parts = _texts(prompts[turn_id])
            if sum(map(len, parts)) <= _MAX_CHARACTERS:
                texts[turn_id] = parts
    return texts


def _compared(
    group: Group, first_texts: Sequence[str], texts: Mapping[str, Sequence[str]]
) -> tuple[Group, list[DuplicateKind]]:
    """The group without the prefixes that no normalisation makes equal, and what differs in the
    others by their texts. Prefixes without a text stay."""
    kinds_of = {turn_id: normalisations(first_texts, parts) for turn_id, parts in texts.items()}
    unequal = {_head(turn) for turn in group.others if kinds_of.get(turn.id, []) is None}
    turns = [turn for turn in group.turns if _head(turn) not in unequal]
    heads = {head: turn for head, turn in group.heads.items() if head not in unequal}
    text_kinds = set[DuplicateKind]().union(*(kinds for kinds in kinds_of.values() if kinds))
    tool_kinds = [group.kind] if group.kind in ("tool_order", "key_order") else []
    kinds = [*tool_kinds, *(kind for kind in _NORMALISATIONS if kind in text_kinds)]
    return replace(group, turns=turns, heads=heads), kinds


def normalisations(first: Sequence[str], second: Sequence[str]) -> list[DuplicateKind] | None:
    """The normalisations that are needed to make the texts equal. None where even all of them do
    not. Each one without which the texts are still equal is left out."""
    needed = list(_NORMALISATIONS)
    if _normal(first, needed) != _normal(second, needed):
        return None
    for kind in list(needed):
        fewer = [kind_left for kind_left in needed if kind_left != kind]
        if _normal(first, fewer) == _normal(second, fewer):
            needed = fewer
    return needed


class Replay(NamedTuple):
    """What a group's turns would have cost."""

    # As they were sent.
    before: Sums
    # With one name for all their prefixes.
    after: Sums
    # Both sums, for the turns of each key.
    by_key: dict[str, tuple[Sums, Sums]]


def simulated(group: Group, min_tokens: int) -> Replay:
    """Replay the group's turns through the contract's cache: as sent, and with one name for all
    their prefixes."""
    as_sent = Cache(min_tokens)
    as_one = Cache(min_tokens)
    by_key: dict[str, tuple[Sums, Sums]] = {}
    is_marked = _is_marked(group)
    for turn in group.turns:
        marks: Sequence[Mark] = turn.marks if is_marked else _HEAD.marks(turn)
        before, after = by_key.setdefault(turn.key, (Sums(), Sums()))
        before.add(as_sent.take(turn, marks), turn.rates)
        after.add(as_one.take(renamed(group, turn), marks), turn.rates)
    return Replay(as_sent.sums, as_one.sums, by_key)


def renamed(group: Group, turn: Observation) -> Observation:
    """The turn as if it had the prefix of the group's first turn, with its own tokens. Names behind
    the sketched segments stay as they are."""
    first = group.first
    segment_digests = turn.segment_digests
    digests = list(turn.digests)
    chain = blake2b(first.digests[first.prefix_at(first.head - 1)], digest_size=8)
    reached = 0
    for place, segment in enumerate(turn.places):
        if segment < turn.head:
            first_place = first.prefix_at(segment)
            digests[place] = first.digests[first_place] if first_place >= 0 else digests[place]
        elif segment < len(segment_digests):
            chain.update(b"".join(segment_digests[turn.head + reached : segment + 1]))
            reached = segment + 1 - turn.head
            digests[place] = chain.digest()
    return replace(turn, digests=digests)


def _is_marked(group: Group) -> bool:
    return any(turn.marks for turn in group.turns)


def _head(turn: Observation) -> bytes | None:
    """The name of the tools and system blocks. None where there are none, or where some have no
    sketch."""
    segment_digests = turn.segment_digests[: turn.head]
    is_whole = 0 < turn.head == len(segment_digests) and turn.prefix_at(turn.head - 1) >= 0
    return b"%d:" % turn.num_tools + b"".join(segment_digests) if is_whole else None


def _joins(group: Group, turn: Observation) -> bool:
    """Whether the turn's prefix is nearly the group's. If it is, note in the group what differs
    first."""
    first = group.first
    if (first.num_tools, first.num_system) != (turn.num_tools, turn.num_system):
        return False
    before = first.segments[: first.head]
    after = turn.segments[: turn.head]
    kind: DuplicateKind = "varying_text"
    if Counter(tool.unordered for tool in before[: first.num_tools]) == Counter(
        tool.unordered for tool in after[: turn.num_tools]
    ):
        before = before[first.num_tools :]
        after = after[turn.num_tools :]
    same = sum(segment.tokens for segment in turn.segments[: turn.num_tools])
    same = same if len(after) < turn.head else 0
    for there, here in zip(before, after, strict=True):
        has_pieces = bool(there.pieces or here.pieces)
        alike = overlap(there.pieces, here.pieces) if has_pieces else 0.0
        alike = 1.0 if there.digest == here.digest else alike
        is_short = not has_pieces and max(there.tokens, here.tokens) <= _SHORT_TOKENS
        if alike < _ALIKE and not is_short:
            return False
        same += round(alike * here.tokens)
    if same < _MOSTLY * sum(segment.tokens for segment in turn.segments[: turn.head]):
        return False
    if not group.path:
        place = next(
            number
            for number, digest in enumerate(turn.segment_digests)
            if digest != first.segment_digests[number]
        )
        difference = difference_at(first, turn, place)
        if difference is not None and (
            difference.kind == "tool_order" or difference.kind == "key_order"
        ):
            kind = difference.kind
        group.kind = kind
        group.place = place
        number = place if place < turn.num_tools else place - turn.num_tools
        group.path = f"{'tools' if place < turn.num_tools else 'system'}.{number}"
    return True


def _texts(prompt: Any) -> list[str]:
    """The texts of the tools and of the system blocks. Tools come in the order of their names, as
    JSON with sorted keys."""
    tools = sorted(prompt.get("tools") or (), key=lambda tool: str(tool.get("name")))
    described = [json.dumps(tool, sort_keys=True) for tool in tools]
    return [*described, *(str(block.get("text")) for block in prompt.get("system") or ())]


def _normal(texts: Iterable[str], kinds: Iterable[DuplicateKind]) -> list[str]:
    normal = []
    for text in texts:
        for kind in kinds:
            pattern = _NORMALISATIONS[kind]
            is_space = kind == "whitespace"
            text = pattern.sub(" ", text).strip() if is_space else pattern.sub("\0", text)
        normal.append(text)
    return normal

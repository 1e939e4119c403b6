"""A week's advice in a few lines, each with its number. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.protocol import Ttl
from gateway.admin.structs.advice import Finding, LineKind, StreamAdvice, SummaryLine

MAX_LINES = 6
_MAX_OF_A_KIND = 2
MIN_TURNS = 20
"""Fewer requests say too little about a week."""
_MAX_TURNS_NAMED = 5
_LEAST_LOSS = 0.01
_TTL_WORDS: dict[Ttl, str] = {"5m": "5-minute", "1h": "1-hour"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPrefix:
    """A marked prefix over its whole life, and what its `better_ttl` would have saved."""

    workspace: str
    better_ttl: Ttl
    saves_nano: int
    saves_multiples: float
    num_turns: int
    last_turn: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A workspace's marked tokens of the range. `saved_nano` is None where a turn has no price."""

    workspace: str
    num_turns: int
    read: int
    written: int
    write_premium: float
    prompt_tokens: int
    saved_nano: int | None

    @property
    def loss(self) -> float:
        """What the writes cost more than the reads saved, in input tokens."""
        return self.write_premium - self.read * 0.9

    @property
    def is_unpaid(self) -> bool:
        if self.num_turns < MIN_TURNS or self.loss <= _LEAST_LOSS * self.prompt_tokens:
            return False
        return self.saved_nano is None or self.saved_nano < 0


def summary_lines(
    streams: Iterable[StreamAdvice],
    prefixes: Sequence[KnownPrefix],
    spent: Iterable[Spent],
) -> tuple[list[SummaryLine], int]:
    """The lines that are worth most, the dearest first, and how many more there are.

    No more than two lines are of one kind.
    """
    found = [*_of_ttls(prefixes), *(_unpaid(each) for each in spent if each.is_unpaid)]
    for stream in streams:
        if stream.num_turns >= MIN_TURNS:
            found += _of_stream(stream)
    found.sort(key=lambda line: -line.multiples)
    kinds: Counter[str] = Counter()
    kept: list[SummaryLine] = []
    for line in found:
        kinds[line.kind] += 1
        if kinds[line.kind] <= _MAX_OF_A_KIND and len(kept) < MAX_LINES:
            kept.append(line)
    return kept, len(found) - len(kept)


def _of_ttls(prefixes: Sequence[KnownPrefix]) -> Iterable[SummaryLine]:
    for ttl, words in _TTL_WORDS.items():
        found = [each for each in prefixes if each.better_ttl == ttl and each.saves_nano > 0]
        num_turns = sum(each.num_turns for each in found)
        if num_turns < MIN_TURNS:
            continue
        found.sort(key=lambda each: -each.saves_nano)
        workspaces = {each.workspace for each in found}
        multiples = round(sum(each.saves_multiples for each in found), 1)
        many = len(found) != 1
        yield SummaryLine(
            kind="ttl",
            text=f"{len(found):,} prefix{'es' if many else ''} would have been cheaper with a"
            f" {words} TTL, by {multiples:,.0f} input tokens' worth over all {num_turns:,} requests"
            f" of {'their lives' if many else 'its life'}.",
            page="savings",
            workspace=workspaces.pop() if len(workspaces) == 1 else None,
            model=None,
            multiples=multiples,
            nano=sum(each.saves_nano for each in found),
            num_turns=num_turns,
            turns=[each.last_turn for each in found if each.last_turn][:_MAX_TURNS_NAMED],
        )


def _unpaid(spent: Spent) -> SummaryLine:
    return SummaryLine(
        kind="unpaid",
        text=f"Workspace {spent.workspace} pays more for writes than it saves: {spent.written:,}"
        f" tokens were written and {spent.read:,} were read in {spent.num_turns:,} requests, which"
        f" costs {spent.loss:,.0f} input tokens' worth more than no markers.",
        page="savings",
        workspace=spent.workspace,
        model=None,
        multiples=round(spent.loss, 1),
        nano=None if spent.saved_nano is None else -spent.saved_nano,
        num_turns=spent.num_turns,
        turns=[],
    )


def _of_stream(stream: StreamAdvice) -> Iterable[SummaryLine]:
    about = f"Workspace {stream.workspace} with {stream.model}"
    if stream.verdict != "leave":
        yield _line(stream, "markers", f"{about}: {stream.text}")
    faults = [each for each in stream.findings if each.multiples > 0]
    if stream.verdict != "leave":
        # The advised markers end it.
        faults = [each for each in faults if each.kind != "changing_end"]
    if faults:
        worst = max(faults, key=lambda each: each.multiples)
        yield _line(stream, "fault", f"{about}, {worst.path}: {worst.text}", worst)
    if stream.prewarm.pays:
        yield _line(stream, "prewarm", f"{about}: {stream.prewarm.text}")


def _line(
    stream: StreamAdvice, kind: LineKind, text: str, finding: Finding | None = None
) -> SummaryLine:
    worth = stream.prewarm.saves if kind == "prewarm" else stream.saves
    return SummaryLine(
        kind=kind,
        text=text,
        page="advice",
        workspace=stream.workspace,
        model=stream.model,
        multiples=worth.multiples if finding is None else finding.multiples,
        nano=worth.nano if finding is None else finding.nano,
        num_turns=stream.num_turns if finding is None else finding.num_turns,
        turns=stream.turns if finding is None else finding.turns,
    )

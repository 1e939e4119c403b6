"""A week's advice in a few lines, each with its number. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from engine.protocol import Ttl
from gateway.advice.cache import MULTIPLES
from gateway.base.words import counted
from gateway.prices.price import cost_with_ttl
from gateway.structs.advice import Amount, Finding, LineKind, StreamAdvice, SummaryLine
from gateway.structs.usage import PrefixReport, Totals

MAX_LINES = 6
_MAX_OF_A_KIND = 2
MIN_TURNS = 20
"""Fewer requests say too little about a week."""
_MAX_TURNS_NAMED = 5
_LEAST_LOSS = 0.01
_ABOUT_THE_SAME = 0.01
_OF_KEYS = "keys"
_SOURCES = ("unpaid", "ttl", _OF_KEYS)
"""What a line is told of: of two that say about the same, the first is kept."""
_TTL_WORDS: dict[Ttl, str] = {"5m": "5-minute", "1h": "1-hour"}


def summary_lines(
    streams: Iterable[StreamAdvice],
    prefixes: Sequence[PrefixReport],
    spent: Mapping[str, Totals],
    keys: Mapping[str, str],
) -> tuple[list[SummaryLine], int]:
    """The lines that are worth most, the dearest first, and how many more there are.

    `spent` are the sums of workspaces, `keys` the names of keys by id. No more than two lines are
    of one kind.
    """
    found: list[SummaryLine] = []
    # Nothing of prefixes whose costs are not known, or that have the better TTL.
    for ttl, words in _TTL_WORDS.items():
        gains = [
            (nano, each)
            for each in prefixes
            if each.better_ttl == ttl and (nano := each.better_ttl_saves_nano or 0) > 0
        ]
        gains.sort(key=lambda gain: -gain[0])
        better = [each for _, each in gains]
        num_turns = sum(each.requests for each in better)
        if num_turns < MIN_TURNS:
            continue
        workspaces = {each.workspace for each in better}
        multiples = 0.0
        for each in better:
            count = each.requests
            marked = each.cache_read_tokens + each.written_tokens
            with_5m = cost_with_ttl(MULTIPLES, "5m", marked // count, count, each.gaps_5m)
            in_hour = each.gaps_5m + each.gaps_1h
            with_1h = cost_with_ttl(MULTIPLES, "1h", marked // count, count, in_hour)
            multiples += (with_5m - with_1h if ttl == "1h" else with_1h - with_5m) / 100
        many = len(better) != 1
        found.append(
            SummaryLine(
                kind="ttl",
                text=f"{len(better):,} prefix{'es' if many else ''} would have been cheaper with a"
                f" {words} TTL, by the price of {multiples:,.0f} input tokens over"
                f" {counted(num_turns, 'request')} of {'their lives' if many else 'its life'}.",
                page="savings",
                workspace=workspaces.pop() if len(workspaces) == 1 else None,
                model=None,
                multiples=round(multiples, 1),
                nano=sum(nano for nano, _ in gains),
                num_turns=num_turns,
                turns=[each.look.last_turn for each in better if each.look][:_MAX_TURNS_NAMED],
            )
        )
    for workspace, sums in spent.items():
        # Where writes cost more than reads saved, in input tokens and, if it is known, in money.
        loss = sums.write_premium - sums.cache_read_tokens * 0.9
        is_lost = sums.unpriced > 0 or sums.saved_nano < 0
        if sums.requests < MIN_TURNS or loss <= _LEAST_LOSS * sums.prompt_tokens or not is_lost:
            continue
        text = (
            f"Workspace {workspace} pays more for writes than it saves: {sums.written_tokens:,}"
            f" tokens were written and {sums.cache_read_tokens:,} were read in {sums.requests:,}"
            f" requests, which costs the price of {loss:,.0f} input tokens more than no markers."
        )
        found.append(
            SummaryLine(
                kind="unpaid",
                text=text,
                page="savings",
                workspace=workspace,
                model=None,
                multiples=round(loss, 1),
                nano=None if sums.unpriced else -sums.saved_nano,
                num_turns=sums.requests,
                turns=[],
            )
        )
    lines = [
        line for stream in streams if stream.num_turns >= MIN_TURNS for line in _lines(stream, keys)
    ]
    found = _merged([*found, *lines])
    found.sort(key=lambda line: -line.multiples)
    kinds: Counter[str] = Counter()
    shown: list[SummaryLine] = []
    for line in found:
        kinds[line.kind] += 1
        if kinds[line.kind] <= _MAX_OF_A_KIND and len(shown) < MAX_LINES:
            shown.append(line)
    return shown, len(found) - len(shown)


def _lines(stream: StreamAdvice, keys: Mapping[str, str]) -> Iterator[SummaryLine]:
    """The verdict, and the dearest other finding and a pre-warm that go with it."""
    about = f"Workspace {stream.workspace}, key {keys.get(stream.key, stream.key)}"
    about += f" with {stream.model}"
    fix = stream.fix
    if fix is not None:
        # A near-duplicate's text names its workspace, and may be of several keys.
        text = stream.text if stream.is_near else f"{about}, {fix.path}: {stream.text}"
        yield _line(stream, "fault", text, fix)
    elif stream.verdict != "leave":
        kind: LineKind = "prewarm" if stream.verdict == "prewarm" else "markers"
        yield _line(stream, kind, f"{about}: {stream.text}", stream.saves)
    others = [each for each in stream.findings if each != fix and each.kind != "changing_end"]
    worst = max(others, key=lambda each: each.multiples, default=None)
    if worst is not None and worst.multiples > 0:
        yield _line(stream, "fault", f"{about}, {worst.path}: {worst.text}", worst)
    if stream.prewarm.pays and stream.verdict != "prewarm":
        yield _line(stream, "prewarm", f"{about}: {stream.prewarm.text}", stream.prewarm.saves)


def _line(stream: StreamAdvice, kind: LineKind, text: str, worth: Amount | Finding) -> SummaryLine:
    turns = worth if isinstance(worth, Finding) else stream
    return SummaryLine(
        kind=kind,
        text=text,
        page="advice",
        workspace=stream.workspace,
        model=stream.model,
        multiples=worth.multiples,
        nano=worth.nano,
        num_turns=turns.num_turns,
        turns=turns.turns,
    )


def _merged(lines: Iterable[SummaryLine]) -> list[SummaryLine]:
    """Each finding once: those of one sentence are added up. What is told of a whole
    workspace and what is advised for its keys are about the same tokens, so of these stays what
    saves most."""
    by_text: dict[tuple[str, str | None, str | None], SummaryLine] = {}
    for line in lines:
        about = line.text, line.workspace, line.model
        before = by_text.get(about)
        if before is not None:
            is_priced = before.nano is not None and line.nano is not None
            line = msgspec.structs.replace(
                before,
                multiples=round(before.multiples + line.multiples, 1),
                nano=(before.nano or 0) + (line.nano or 0) if is_priced else None,
            )
        by_text[about] = line
    worths: dict[str, dict[str, float]] = {}
    for line in by_text.values():
        if line.workspace is not None:
            sums = worths.setdefault(line.workspace, dict.fromkeys(_SOURCES, 0.0))
            sums[_source(line)] += line.multiples
    best = {
        workspace: next(
            source
            for source, worth in sums.items()
            if worth * (1 + _ABOUT_THE_SAME) >= max(sums.values())
        )
        for workspace, sums in worths.items()
    }
    return [
        line
        for line in by_text.values()
        if line.workspace is None or best[line.workspace] == _source(line)
    ]


def _source(line: SummaryLine) -> str:
    return line.kind if line.kind in _SOURCES else _OF_KEYS

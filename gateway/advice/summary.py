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
"""The fewest requests of a group that give a line."""
_MAX_TURNS_NAMED = 5
_LEAST_LOSS = 0.01
_ABOUT_THE_SAME = 0.01
_OF_KEYS = "keys"
_SOURCES = ("unpaid", "ttl", _OF_KEYS)
"""Where lines come from. If two sources save about the same, the lines of the first one stay."""
_TTL_WORDS: dict[Ttl, str] = {"5m": "5-minute", "1h": "1-hour"}


def summary_lines(
    streams: Iterable[StreamAdvice],
    prefixes: Sequence[PrefixReport],
    spent: Mapping[str, Totals],
    keys: Mapping[str, str],
) -> tuple[list[SummaryLine], int]:
    """The lines that save most, in this order, and the number of lines that are left out.

    At most MAX_LINES are chosen, and at most two of one kind. `spent` has the sums by workspace,
    and `keys` has the names of keys by id.
    """
    lines = _ttl_lines(prefixes)
    lines += _unpaid_lines(spent)
    for stream in streams:
        if stream.num_turns >= MIN_TURNS:
            lines += _lines(stream, keys)
    lines = _merged(lines)
    lines.sort(key=lambda line: -line.multiples)
    kinds: Counter[str] = Counter()
    chosen: list[SummaryLine] = []
    for line in lines:
        kinds[line.kind] += 1
        if kinds[line.kind] <= _MAX_OF_A_KIND and len(chosen) < MAX_LINES:
            chosen.append(line)
    return chosen, len(lines) - len(chosen)


def _ttl_lines(prefixes: Sequence[PrefixReport]) -> list[SummaryLine]:
    """A line for each TTL that would have made prefixes cheaper. Prefixes with unknown costs are
    left out, and so are prefixes that have the better TTL already."""
    lines: list[SummaryLine] = []
    for ttl in _TTL_WORDS:
        cheaper = [
            prefix
            for prefix in prefixes
            if prefix.better_ttl == ttl and (prefix.better_ttl_saves_nano or 0) > 0
        ]
        if sum(prefix.requests for prefix in cheaper) >= MIN_TURNS:
            lines.append(_ttl_line(ttl, cheaper))
    return lines


def _ttl_line(ttl: Ttl, prefixes: list[PrefixReport]) -> SummaryLine:
    """The line of the prefixes that would have been cheaper with `ttl`."""
    prefixes.sort(key=lambda prefix: -(prefix.better_ttl_saves_nano or 0))
    num_turns = sum(prefix.requests for prefix in prefixes)
    multiples = sum(_saved_multiples(ttl, prefix) for prefix in prefixes)
    lives = "its life" if len(prefixes) == 1 else "their lives"
    workspaces = {prefix.workspace for prefix in prefixes}
    return SummaryLine(
        kind="ttl",
        text=f"{counted(len(prefixes), 'prefix', 'prefixes')} would have been cheaper with a"
        f" {_TTL_WORDS[ttl]} TTL, over the {counted(num_turns, 'request')} of {lives}.",
        page="savings",
        workspace=workspaces.pop() if len(workspaces) == 1 else None,
        model=None,
        multiples=round(multiples, 1),
        nano=sum(prefix.better_ttl_saves_nano or 0 for prefix in prefixes),
        num_turns=num_turns,
        turns=[prefix.look.last_turn for prefix in prefixes if prefix.look][:_MAX_TURNS_NAMED],
    )


def _saved_multiples(ttl: Ttl, prefix: PrefixReport) -> float:
    """What `ttl` would have saved against the other TTL class, in prices of input tokens."""
    count = prefix.requests
    tokens = (prefix.cache_read_tokens + prefix.written_tokens) // count
    in_hour = prefix.gaps_5m + prefix.gaps_1h
    with_5m = cost_with_ttl(MULTIPLES, "5m", tokens, count, prefix.gaps_5m)
    with_1h = cost_with_ttl(MULTIPLES, "1h", tokens, count, in_hour)
    saved = with_5m - with_1h if ttl == "1h" else with_1h - with_5m
    return saved / 100


def _unpaid_lines(spent: Mapping[str, Totals]) -> list[SummaryLine]:
    """A line for each workspace whose writes cost more than its reads saved. The loss is in prices
    of input tokens. If all turns have prices, it is in money, too."""
    lines: list[SummaryLine] = []
    for workspace, sums in spent.items():
        loss = sums.write_premium - sums.cache_read_tokens * 0.9
        is_lost = sums.unpriced > 0 or sums.saved_nano < 0
        if sums.requests < MIN_TURNS or loss <= _LEAST_LOSS * sums.prompt_tokens or not is_lost:
            continue
        text = (
            f"Workspace {workspace} pays more for writes than it saves: {sums.written_tokens:,}"
            f" tokens were written and {sums.cache_read_tokens:,} were read in {sums.requests:,}"
            f" requests, which costs the price of {loss:,.0f} input tokens more than no markers."
        )
        line = SummaryLine(
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
        lines.append(line)
    return lines


def _lines(stream: StreamAdvice, keys: Mapping[str, str]) -> Iterator[SummaryLine]:
    """The lines of one stream: on its verdict, its dearest other finding, and its pre-warm."""
    about = f"Workspace {stream.workspace}, key {keys.get(stream.key, stream.key)}"
    about += f" with {stream.model}"
    fix = stream.fix
    if fix is not None:
        # The text of a near-duplicate names its workspace. It may be about several keys.
        text = stream.text if stream.is_near else f"{about}, {fix.path}: {stream.text}"
        # If near-duplicates differ in the fix's block, the fix saves more than its finding says. So
        # the line has the stream's `saves`.
        yield _line(stream, "fault", text, stream.saves, fix)
    elif stream.verdict != "leave":
        kind: LineKind = "prewarm" if stream.verdict == "prewarm" else "markers"
        yield _line(stream, kind, f"{about}: {stream.text}", stream.saves, stream)
    others = [
        finding for finding in stream.findings if finding != fix and finding.kind != "changing_end"
    ]
    worst = max(others, key=lambda finding: finding.multiples, default=None)
    if worst is not None and worst.multiples > 0:
        yield _line(stream, "fault", f"{about}, {worst.path}: {worst.text}", worst, worst)
    if stream.prewarm.pays and stream.verdict != "prewarm":
        prewarm = stream.prewarm
        yield _line(stream, "prewarm", f"{about}: {prewarm.text}", prewarm.saves, stream)


def _line(
    stream: StreamAdvice,
    kind: LineKind,
    text: str,
    worth: Amount | Finding,
    turns: Finding | StreamAdvice,
) -> SummaryLine:
    """A line that saves what `worth` says, and names the turns of `turns`."""
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
    """Add up lines that have the same sentence, and leave out lines about the same tokens.

    Lines about a whole workspace and lines about its keys are about the same tokens. So a workspace
    keeps only the lines of the source that saves most.
    """
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

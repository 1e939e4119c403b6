"""One verdict for each group of requests: the advice that saves most. Pure.

Markers, faults and near-duplicates are judged separately, each by what it alone would have saved.
Advice that contradicts the verdict is left out. "Mark nothing" contradicts every fault, because a
fault's tokens are read only where something is marked. "Leave as it is" contradicts every fault,
too. A near-duplicate contradicts both.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from gateway.structs.advice import Amount, Finding, NearDuplicate, StreamAdvice

LEAST_GAIN = 0.01
"""Advice that saves less than this share of the cost is not worth a change."""


def decided(advice: StreamAdvice) -> StreamAdvice:
    """The advice with what saves most as its verdict. `advice` has the verdict on its markers and
    all findings."""
    findings = [finding for finding in advice.findings if _is_worth_words(finding, advice)]
    advice = _with_prewarm(replace(advice, findings=findings))
    faults = [finding for finding in findings if finding.kind not in _OF_MARKERS]
    best = max(faults, key=_order, default=None)
    if best is not None and gain_over(best, advice.saves) > 0:
        return following(advice, best, _saving(best))
    if advice.verdict == "unmark":
        findings = [finding for finding in findings if finding.kind == "changing_end"]
    elif advice.verdict == "leave":
        findings = [finding for finding in findings if finding.kind != "changing_end"]
    else:
        # With the advised markers, findings about the present ones no longer hold.
        findings = faults
    return replace(advice, findings=sorted(findings, key=_order, reverse=True))


def following(advice: StreamAdvice, fix: Finding, saves: Amount) -> StreamAdvice:
    """The advice with a fix as its verdict. The fix `saves` so much in this stream."""
    others = [
        finding
        for finding in advice.findings
        if finding.kind not in _OF_MARKERS and not _same(finding, fix)
    ]
    return replace(
        advice,
        verdict="fix",
        text=f"{fix.text} {fix.change}",
        markers=[],
        policy=None,
        next_best=None,
        saves=saves,
        fix=fix,
        is_near=False,
        findings=[fix, *sorted(others, key=_order, reverse=True)],
    )


def reconciled(
    streams: Iterable[StreamAdvice], near: Iterable[NearDuplicate]
) -> tuple[list[StreamAdvice], list[NearDuplicate]]:
    """The streams, and the near-duplicates that do not contradict them, the dearest first.

    A near-duplicate is left out unless it saves more than all verdicts together that it
    contradicts. It becomes the verdict of those streams, and of the streams where it saves more
    than their verdict.
    """
    decisions = list(streams)
    kept: list[NearDuplicate] = []
    for finding in sorted(near, key=_order, reverse=True):
        affected = [
            number
            for number, stream in enumerate(decisions)
            if (stream.workspace, stream.model) == (finding.workspace, finding.model)
            and finding.by_key.get(stream.key, _NOTHING).multiples > 0
        ]
        against = [number for number in affected if _is_against(decisions[number], finding)]
        if gain_over(finding, total([decisions[number].saves for number in against])) <= 0:
            continue
        kept.append(finding)
        for number in affected:
            stream = decisions[number]
            part = finding.by_key[stream.key]
            if number in against or gain_over(part, stream.saves) > 0:
                decisions[number] = _with_near(stream, finding, part)
    return decisions, kept


def gain_over(candidate: Amount | Finding, other: Amount | Finding) -> float:
    """How much more the first one saves: in nano-dollars where both have a price, else in input
    tokens."""
    if candidate.nano is not None and other.nano is not None:
        return float(candidate.nano - other.nano)
    return candidate.multiples - other.multiples


def total(amounts: Sequence[Amount]) -> Amount:
    """The sum of the amounts. Its money and its time are None if those of any amount are."""
    nanos = [amount.nano for amount in amounts if amount.nano is not None]
    seconds = [amount.prefill_seconds for amount in amounts if amount.prefill_seconds is not None]
    return Amount(
        tokens=sum(amount.tokens for amount in amounts),
        multiples=round(sum(amount.multiples for amount in amounts), 1),
        nano=sum(nanos) if len(nanos) == len(amounts) else None,
        prefill_seconds=round(sum(seconds), 3) if len(seconds) == len(amounts) else None,
    )


_NOTHING = Amount(tokens=0, multiples=0.0, nano=0)
_OF_MARKERS = ("changing_end", "too_short")


def _with_prewarm(advice: StreamAdvice) -> StreamAdvice:
    """The advice with a pre-warm as its verdict, if the pre-warm pays and needs other markers, or
    saves more than the advised markers."""
    prewarm = advice.prewarm
    has_same_markers = advice.verdict == "mark" and prewarm.markers == advice.markers
    if not prewarm.pays or (has_same_markers and gain_over(prewarm.saves, advice.saves) <= 0):
        return advice
    where = ", ".join(f"{marker.place} ({marker.ttl})" for marker in prewarm.markers)
    return replace(
        advice,
        verdict="prewarm",
        text=f"{prewarm.text} Mark {where} for it." if where else prewarm.text,
        markers=prewarm.markers,
        policy=advice.policy if has_same_markers else None,
        next_best=None,
        saves=total([advice.saves, prewarm.saves]),
    )


def _with_near(stream: StreamAdvice, near: NearDuplicate, part: Amount) -> StreamAdvice:
    """The advice of a stream with a near-duplicate as its verdict. `part` is what it saves in this
    stream. If the stream has a fault in the same block, both are the same finding. Then the fault
    is the verdict, because it names the stream's own turns."""
    faults = [finding for finding in stream.findings if _same(finding, near)]
    fault = max(faults, key=_order, default=None)
    if fault is not None:
        saves = part if gain_over(part, fault) > 0 else _saving(fault)
        advice = following(stream, fault, saves)
    else:
        fix = Finding(
            kind=near.kind,
            path=near.path,
            text=near.text,
            change=near.change,
            num_turns=near.num_turns,
            turns=near.turns,
            earlier=near.earlier,
            tokens=part.tokens,
            multiples=part.multiples,
            nano=part.nano,
            prefill_seconds=part.prefill_seconds,
        )
        advice = replace(following(stream, fix, part), is_near=True)
    best = max(advice.findings, key=_order)
    if gain_over(best, advice.saves) > 0:
        return following(advice, best, _saving(best))
    return advice


def _is_against(stream: StreamAdvice, near: NearDuplicate) -> bool:
    """Whether the verdict contradicts the near-duplicate, or says the same of one key's requests
    alone."""
    if stream.fix is not None:
        return _same(stream.fix, near)
    return stream.verdict in ("leave", "unmark")


def _same(finding: Finding, other: Finding) -> bool:
    """Whether both are about the same block. A finding on the path `tools` is about all tools."""
    if finding.path == "tools" or other.path == "tools":
        return finding.path.partition(".")[0] == other.path.partition(".")[0]
    return finding.path == other.path


def _is_worth_words(finding: Finding, advice: StreamAdvice) -> bool:
    """Whether advice that would save something saves enough. Advice without savings is kept."""
    if finding.multiples <= 0:
        return finding.kind in _OF_MARKERS
    as_sent = next(outcome for outcome in advice.outcomes if outcome.name == "as_sent")
    if finding.nano is not None and as_sent.nano is not None:
        return finding.nano > LEAST_GAIN * as_sent.nano
    return finding.multiples > LEAST_GAIN * as_sent.multiples


def _order(finding: Finding) -> tuple[float, float]:
    return (0.0 if finding.nano is None else float(finding.nano), finding.multiples)


def _saving(finding: Finding) -> Amount:
    return Amount(
        tokens=finding.tokens,
        multiples=finding.multiples,
        nano=finding.nano,
        prefill_seconds=finding.prefill_seconds,
    )

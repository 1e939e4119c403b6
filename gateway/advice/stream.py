"""Advice for one stream: the turns of one key with one model, in order of time. Pure."""

from collections.abc import Sequence

from engine.protocol import WRITE_FIELDS
from gateway.admin.structs.advice import (
    Amount,
    Finding,
    Marker,
    Outcome,
    Policy,
    Prewarm,
    StreamAdvice,
    Verdict,
)
from gateway.advice import words
from gateway.advice.cache import Cache, Sums
from gateway.advice.faults import Fault, find_faults
from gateway.advice.observation import Observation
from gateway.advice.placements import Placement, placements_for, shared_ends

# A way that saves less than this share of the cost is no reason to change anything.
_LEAST_GAIN = 0.01
_MAX_TURNS_NAMED = 5
_MAX_FINDINGS = 20
_ANTHROPIC = "anthropic"


def advise_stream(turns: Sequence[Observation], min_tokens: int) -> StreamAdvice:
    """Compare the ways to mark these turns. `turns` must not be empty.

    Every way is computed for a cache that loses nothing. What is saved is the difference to the
    markers as they were sent, in the same cache.
    """
    first = turns[0]
    observed = _observed(turns)
    as_sent = _simulated(turns, None, min_tokens)
    rate = _prefill_rate(turns)
    tried = [(way, _simulated(turns, way, min_tokens)) for way in placements_for(turns)]
    is_priced = as_sent.nano is not None
    best, sums = _best(tried, is_priced)
    gain = _cost(as_sent, is_priced) - _cost(sums, is_priced)
    is_gain = gain > _LEAST_GAIN * _cost(as_sent, is_priced)
    verdict: Verdict = "leave"
    if is_gain:
        verdict = "unmark" if best.name == "none" else "mark"
    saves = amount(as_sent, sums if is_gain else as_sent, rate)
    others = [each for each in tried if each[0] is not best] if is_gain else tried
    head, deeper = shared_ends(turns)
    end = deeper or head
    findings = [_finding(fault, first, rate) for fault in find_faults(turns)[:_MAX_FINDINGS]]
    findings += _about_markers(turns, min_tokens, as_sent)
    chosen = sums if is_gain else as_sent
    shared = _mean([turn.tokens[at] for turn in turns if end and (at := end.prefix_in(turn)) >= 0])
    markers = _markers(best) if is_gain else []
    return StreamAdvice(
        workspace=first.workspace,
        key=first.key,
        model=first.model,
        num_turns=len(turns),
        first_ms=first.at_ms,
        last_ms=turns[-1].at_ms,
        verdict=verdict,
        text=words.verdict(verdict, markers, saves, len(turns)),
        shared_end=end.path if end else None,
        shared_tokens=shared,
        markers=markers,
        saves=saves,
        next_best=_next_best(others, as_sent, is_priced) if not is_gain else None,
        lost=amount(observed, as_sent, rate),
        outcomes=[
            _outcome("observed", observed, None),
            _outcome("as_sent", as_sent, None),
            *(_outcome(way.name, each, amount(as_sent, each, rate)) for way, each in tried),
        ],
        findings=findings,
        prewarm=_prewarm(chosen, [as_sent, *(each for _, each in tried)], turns, rate),
        policy=_policy(best, turns) if is_gain else None,
        turns=_spread(turns),
        is_estimated=any(turn.is_estimated for turn in turns),
    )


def amount(before: Sums, after: Sums, rate: float | None) -> Amount:
    """What `after` saves of `before`; `rate` is in seconds of prefill per token."""
    paid, pays = before.nano, after.nano
    tokens = before.usage.computed_tokens - after.usage.computed_tokens
    return Amount(
        tokens=tokens,
        multiples=round(before.multiples - after.multiples, 1),
        nano=None if paid is None or pays is None else paid - pays,
        prefill_seconds=None if rate is None else round(tokens * rate, 3),
    )


def _observed(turns: Sequence[Observation]) -> Sums:
    sums = Sums()
    for turn in turns:
        sums.add(turn.usage, turn.rates)
    return sums


def _simulated(turns: Sequence[Observation], way: Placement | None, min_tokens: int) -> Sums:
    """With the markers of a way; of None, as they were sent."""
    cache = Cache(min_tokens)
    for turn in turns:
        cache.take(turn, turn.marks if way is None else way.marks(turn))
    return cache.sums


def _prefill_rate(turns: Sequence[Observation]) -> float | None:
    timed = [turn for turn in turns if turn.prefill_seconds is not None]
    tokens = sum(each.usage.computed_tokens for each in timed)
    return sum(each.prefill_seconds or 0.0 for each in timed) / tokens if tokens else None


def _cost(sums: Sums, is_priced: bool) -> float:
    return float(sums.nano or 0) if is_priced else sums.multiples


def _best(tried: Sequence[tuple[Placement, Sums]], is_priced: bool) -> tuple[Placement, Sums]:
    """The cheapest; a simpler one where it costs hardly more."""
    least = min(_cost(sums, is_priced) for _, sums in tried)
    return next(
        (way, sums)
        for way, sums in tried
        if _cost(sums, is_priced) <= least * (1 + _LEAST_GAIN / 2)
    )


def _next_best(
    others: Sequence[tuple[Placement, Sums]], as_sent: Sums, is_priced: bool
) -> str | None:
    costs = [
        (_cost(sums, is_priced) - _cost(as_sent, is_priced), way.name, sums) for way, sums in others
    ]
    dearer = [each for each in costs if each[0] > _LEAST_GAIN * _cost(as_sent, is_priced)]
    if not dearer:
        return None
    _, name, sums = min(dearer, key=lambda each: each[0])
    return words.next_best(name, sums.multiples - as_sent.multiples)


def _outcome(name: str, sums: Sums, saves: Amount | None) -> Outcome:
    usage = sums.usage
    return Outcome(
        name=name,
        requests_with_read=sums.hits,
        input_tokens=usage.input_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        computed_tokens=usage.computed_tokens,
        multiples=round(sums.multiples, 1),
        nano=sums.nano,
        saves=saves,
        **{name: getattr(usage, name) for name in WRITE_FIELDS.values()},
    )


def _markers(way: Placement) -> list[Marker]:
    made = []
    if way.shared is not None and way.shared_ttl is not None:
        made.append(Marker(place=way.shared.path, ttl=way.shared_ttl))
    if way.talk_ttl is not None:
        made.append(Marker(place=words.BEFORE_ANSWER, ttl=way.talk_ttl))
        made.append(Marker(place=words.LAST_BLOCK, ttl=way.talk_ttl))
    return made


def _policy(way: Placement, turns: Sequence[Observation]) -> Policy | None:
    """The policy with the same breakpoints. Anthropic's dialect has markers of its own instead, and
    a policy knows only the end of the system prompt."""
    if any(turn.dialect == _ANTHROPIC for turn in turns):
        return None
    if way.name == "none":
        return Policy(auto_cache="off", auto_cache_ttl=None)
    if way.shared is not None and not _is_head(way, turns):
        return None
    if way.talk_ttl is None:
        return Policy(auto_cache="prefix", auto_cache_ttl=way.shared_ttl)
    if way.shared_ttl in (None, way.talk_ttl):
        return Policy(auto_cache="conversation", auto_cache_ttl=way.talk_ttl)
    return None


def _is_head(way: Placement, turns: Sequence[Observation]) -> bool:
    assert way.shared is not None
    return all(
        way.shared.prefix_in(turn) == turn.carrier(turn.prefix_at(turn.head - 1)) for turn in turns
    )


def _finding(fault: Fault, turn: Observation, rate: float | None) -> Finding:
    rates = turn.rates
    named = fault.named()
    return Finding(
        kind=fault.kind,
        path=fault.path,
        text=words.fault(fault),
        change=words.change(fault),
        tokens=fault.tokens,
        multiples=round(fault.tokens * 0.9, 1),
        nano=None if rates is None else fault.tokens * (rates.input - rates.read),
        prefill_seconds=None if rate is None else round(fault.tokens * rate, 3),
        num_turns=fault.turns,
        turns=[loss.turn for loss in named],
        earlier=[loss.earlier for loss in named],
    )


def _about_markers(turns: Sequence[Observation], min_tokens: int, as_sent: Sums) -> list[Finding]:
    """Markers that do nothing: below the minimum, or at an end that never comes again."""
    short = [t for t in turns if t.marks and t.tokens[t.marks[-1][0]] < min_tokens]
    made = []
    if short:
        longest = max(turn.tokens[turn.marks[-1][0]] for turn in short)
        made.append(words.too_short(len(short), longest, min_tokens, _spread(short)))
    marked = [turn for turn in turns if turn.marks]
    written = as_sent.usage.written_tokens
    if len(marked) > 2 and written and not as_sent.hits:
        made.append(words.changing_end(len(marked), as_sent, _spread(marked)))
    return made


def _prewarm(
    chosen: Sums, ways: Sequence[Sums], turns: Sequence[Observation], rate: float | None
) -> Prewarm:
    """A request ahead writes what the first of the racing turns would have written; that one then
    reads it, and so do the others. What it saves is against the `chosen` markers; it may need
    others of the `ways`."""
    best = min(ways, key=lambda sums: sums.multiples - _spared(sums))
    saved = chosen.multiples - (best.multiples - _spared(best))
    pays = _spared(best) > 0 and saved > _LEAST_GAIN * chosen.multiples
    rates, nano = turns[0].rates, None
    if pays and rates is not None and chosen.nano is not None and best.nano is not None:
        spared = best.raced * (rates.write("5m") - rates.read) - best.first_raced * rates.read
        nano = chosen.nano - (best.nano - spared)
    saves = Amount(
        tokens=best.raced + best.first_raced if pays else 0,
        multiples=round(saved, 1) if pays else 0.0,
        nano=nano,
        prefill_seconds=None if rate is None else round(best.first_raced * rate, 3),
    )
    text = words.prewarm(best if pays else chosen, saved if pays else 0.0)
    races = best.num_races if pays else chosen.num_races
    return Prewarm(pays=pays, num_races=races, saves=saves, text=text)


def _spared(sums: Sums) -> float:
    """What pre-warms before the races would have saved, in input tokens."""
    return max(sums.raced * 1.15 - sums.first_raced * 0.1, 0.0)


def _mean(numbers: Sequence[int]) -> int:
    return round(sum(numbers) / len(numbers)) if numbers else 0


def _spread(turns: Sequence[Observation]) -> list[str]:
    """Some of the turns, from the whole range."""
    step = max(1, len(turns) // _MAX_TURNS_NAMED)
    return [turn.id for turn in turns[::step]][:_MAX_TURNS_NAMED]

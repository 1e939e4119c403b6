"""Advice for one stream: the turns of one key with one model, in order of time. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.protocol import WRITE_FIELDS, InputUsage
from gateway.advice.cache import Cache, Sums
from gateway.advice.faults import Fault, find_faults
from gateway.advice.observation import Observation
from gateway.advice.placements import Placement, placements_for, shared_ends
from gateway.advice.verdicts import LEAST_GAIN, decided
from gateway.base.words import counted
from gateway.prices.price import TokenPrices
from gateway.structs.advice import (
    Amount,
    FaultKind,
    Finding,
    Marker,
    Outcome,
    Policy,
    Prewarm,
    StreamAdvice,
    Verdict,
)

_MAX_TURNS_NAMED = 5
_MAX_FINDINGS = 20
_ANTHROPIC = "anthropic"
_TO_LAST_MESSAGE = "Put the time into the last user message."
_FAULTS: dict[FaultKind, tuple[str, str]] = {
    "tool_order": (
        "The same tools come in another order",
        "Sort the tools by name before sending them.",
    ),
    "key_order": (
        "The same JSON comes with its keys in another order",
        "Write JSON with its keys in a fixed order.",
    ),
    "tool_set": (
        "Tools are added or left out",
        "Send all tools always, and choose with `tool_choice`.",
    ),
    "date": (
        "A part of the text changes once a day, as a date does",
        "Put the date into the last user message.",
    ),
    "hour": ("A part of the text changes once an hour, as a time does", _TO_LAST_MESSAGE),
    "minute": ("A part of the text changes once a minute, as a time does", _TO_LAST_MESSAGE),
    "nonce": (
        "A part of the text is new in every request, as an id or a time is",
        "Put it into the last user message, or leave it out.",
    ),
    "varying_text": (
        "A part of the text changes from request to request",
        "Put what changes behind what stays the same, in a block of its own.",
    ),
    "growing_text": (
        "The text grows with every request",
        "Leave the text as it is and put what is new into a message at the end.",
    ),
    "moved_text": (
        "A text stands at another place than before",
        "Keep the text at the place where it stood first.",
    ),
    "sliding_history": (
        "The first messages are left out and the others move up",
        "Append only, and cut the history rarely and by much.",
    ),
}
"""For each kind of fault: what happens, and how to change it."""
_TIMED = ("date", "hour", "minute", "nonce")
# What to change where the fault is in a message. That may be the last user message itself.
_BEHIND = "Put it behind what stays the same, in a block of its own, or leave it out."
_PARTS = {"start": " at its start", "middle": " in its middle", "end": " at its end"}
_WAYS = {
    "none": "no marker",
    "shared_5m": "a 5-minute marker behind what requests share",
    "shared_1h": "a 1-hour marker behind what requests share",
    "conversation_5m": "5-minute markers along the conversation",
    "conversation_1h": "1-hour markers along the conversation",
    "conversation_5m_shared_1h": "a 1-hour marker behind what requests share and 5-minute markers"
    " along the conversation",
}


class _Marking(NamedTuple):
    """The advice on the markers."""

    verdict: Verdict
    text: str
    # What the turns would have cost with the advised markers.
    chosen: Sums
    saves: Amount
    markers: list[Marker]
    policy: Policy | None = None
    next_best: str | None = None


def advise_stream(turns: Sequence[Observation], min_tokens: int) -> StreamAdvice:
    """Compare the ways to mark these turns, and find what else would have saved tokens.

    There must be at least one turn. The costs of each way and of the markers as sent are computed
    for a cache that loses nothing. `saves` is the difference between the two.
    """
    first = turns[0]
    observed = Sums()
    for turn in turns:
        observed.add(turn.usage, turn.rates)
    rate = prefill_rate(turns)
    as_sent = _simulated(turns, None, min_tokens)
    tried = [(way, _simulated(turns, way, min_tokens)) for way in placements_for(turns)]
    marking = _marking(turns, as_sent, tried, rate)
    head, deeper = shared_ends(turns)
    end = deeper or head
    places = [(turn, end.prefix_in(turn)) for turn in turns] if end else []
    shared = [turn.tokens[place] for turn, place in places if place >= 0]
    outcomes: list[tuple[str, Sums, Amount | None]] = [
        ("observed", observed, None),
        ("as_sent", as_sent, None),
        *((way.name, sums, amount(as_sent, sums, rate)) for way, sums in tried),
    ]
    return decided(
        StreamAdvice(
            workspace=first.workspace,
            key=first.key,
            model=first.model,
            num_turns=len(turns),
            first_ms=first.at_ms,
            last_ms=turns[-1].at_ms,
            verdict=marking.verdict,
            text=marking.text,
            shared_end=end.path if end else None,
            shared_tokens=round(sum(shared) / len(shared)) if shared else 0,
            markers=marking.markers,
            saves=marking.saves,
            next_best=marking.next_best,
            lost=amount(observed, as_sent, rate),
            outcomes=[_outcome(name, sums, saved) for name, sums, saved in outcomes],
            findings=_findings(turns, min_tokens, as_sent, rate),
            prewarm=_prewarm(marking.chosen, [(None, as_sent), *tried], turns, rate),
            policy=marking.policy,
            turns=_spread(turns),
            is_estimated=any(turn.is_estimated for turn in turns),
        )
    )


def _marking(
    turns: Sequence[Observation],
    as_sent: Sums,
    tried: Sequence[tuple[Placement, Sums]],
    rate: float | None,
) -> _Marking:
    is_priced = as_sent.nano is not None

    def cost(sums: Sums) -> float:
        return float(sums.nano or 0) if is_priced else sums.multiples

    before = cost(as_sent)
    least = min(cost(sums) for _, sums in tried)
    over = f"over {counted(len(turns), 'request')}"
    # The first way, the simplest one, that costs hardly more than the cheapest.
    best, sums = next(way for way in tried if cost(way[1]) <= least * (1 + LEAST_GAIN / 2))
    if before - cost(sums) <= LEAST_GAIN * before:
        next_best = None
        dearer = [way for way in tried if cost(way[1]) - before > LEAST_GAIN * before]
        if dearer:
            way, costs = min(dearer, key=lambda candidate: cost(candidate[1]))
            more = costs.multiples - as_sent.multiples
            next_best = (
                f"The next way, {_WAYS[way.name]}, would have cost the price of {more:,.0f} input"
                " tokens more."
            )
        text = f"Leave the markers as they are: none of the other ways is cheaper {over}."
        nothing = amount(as_sent, as_sent, rate)
        return _Marking("leave", text, as_sent, nothing, [], None, next_best)
    saves = amount(as_sent, sums, rate)
    worth = f"would have saved the price of {saves.multiples:,.0f} input tokens {over}"
    markers = _markers(best)
    where = ", ".join(f"{marker.place} ({marker.ttl})" for marker in markers)
    verdict: Verdict = "mark"
    text = f"Mark {where}, and nothing else: that {worth}."
    if best.name == "none":
        verdict = "unmark"
        text = f"Mark nothing: that {worth}, since what is written is hardly read."
    return _Marking(verdict, text, sums, saves, markers, _policy(best, turns))


def _markers(way: Placement) -> list[Marker]:
    markers: list[Marker] = []
    if way.shared is not None and way.shared_ttl is not None:
        markers.append(Marker(place=way.shared.path, ttl=way.shared_ttl))
    if way.talk_ttl is not None:
        places = "before the last answer", "last block"
        markers += [Marker(place=place, ttl=way.talk_ttl) for place in places]
    return markers


def _outcome(name: str, sums: Sums, saves: Amount | None) -> Outcome:
    return Outcome(
        name=name,
        requests_with_read=sums.hits,
        input_tokens=sums.usage.input_tokens,
        cache_read_tokens=sums.usage.cache_read_tokens,
        computed_tokens=sums.usage.computed_tokens,
        multiples=round(sums.multiples, 1),
        nano=sums.nano,
        saves=saves,
        **{field: getattr(sums.usage, field) for field in WRITE_FIELDS.values()},
    )


def prefill_rate(turns: Sequence[Observation]) -> float | None:
    """Seconds to compute one token on the engines that answered these turns: the mean, weighted by
    the prompts' tokens. None where no engine's time is known."""
    timed = [(turn.total, turn.token_seconds) for turn in turns if turn.token_seconds is not None]
    tokens = sum(total for total, _ in timed)
    return sum(total * seconds for total, seconds in timed) / tokens if tokens else None


def amount(before: Sums, after: Sums, rate: float | None) -> Amount:
    """What `after` saves against `before`. `rate` is in seconds of prefill per token."""
    nano_before = before.nano
    nano_after = after.nano
    tokens = before.usage.computed_tokens - after.usage.computed_tokens
    return Amount(
        tokens=tokens,
        multiples=round(before.multiples - after.multiples, 1),
        nano=None if nano_before is None or nano_after is None else nano_before - nano_after,
        prefill_seconds=None if rate is None else round(tokens * rate, 3),
    )


def _simulated(turns: Sequence[Observation], way: Placement | None, min_tokens: int) -> Sums:
    """What the turns cost with the markers of `way`. With None they have the markers as sent."""
    cache = Cache(min_tokens)
    for turn in turns:
        cache.take(turn, turn.marks if way is None else way.marks(turn))
    return cache.sums


def _policy(way: Placement, turns: Sequence[Observation]) -> Policy | None:
    """The policy that sets the same breakpoints. None where no policy does.

    In Anthropic's dialect clients set markers, and no policy is advised. Of the ends of what
    requests share a policy can mark only the end of the system prompt.
    """
    if any(turn.dialect == _ANTHROPIC for turn in turns):
        return None
    if way.name == "none":
        return Policy(auto_cache="off", auto_cache_ttl=None)
    if way.shared is not None and any(
        way.shared.prefix_in(turn) != turn.carrier(turn.prefix_at(turn.head - 1)) for turn in turns
    ):
        return None
    if way.talk_ttl is None:
        return Policy(auto_cache="prefix", auto_cache_ttl=way.shared_ttl)
    if way.shared_ttl in (None, way.talk_ttl):
        return Policy(auto_cache="conversation", auto_cache_ttl=way.talk_ttl)
    return None


def _findings(
    turns: Sequence[Observation], min_tokens: int, as_sent: Sums, rate: float | None
) -> list[Finding]:
    """Findings on what breaks prefixes, and on markers that do nothing: their prefixes are shorter
    than the minimum, or never come again."""
    rates = turns[0].rates
    findings = [_fault_finding(fault, rates, rate) for fault in find_faults(turns)[:_MAX_FINDINGS]]
    marked = [turn for turn in turns if turn.marks]
    lengths = {turn.id: turn.tokens[turn.marks[-1][0]] for turn in marked}
    short = [turn for turn in marked if lengths[turn.id] < min_tokens]
    if short:
        longest = max(lengths[turn.id] for turn in short)
        findings.append(_short_finding(short, longest, min_tokens))
    if len(marked) > 2 and as_sent.usage.written_tokens and not as_sent.hits:
        findings.append(_unread_finding(marked, as_sent.usage))
    return findings


def _fault_finding(fault: Fault, rates: TokenPrices | None, rate: float | None) -> Finding:
    """The finding on a fault. `rate` is in seconds of prefill per token."""
    what, change = _FAULTS[fault.kind]
    if fault.kind in _TIMED and fault.section == "messages":
        change = _BEHIND
    times = counted(fault.turns, "request")
    dearest = sorted(fault.losses, key=lambda loss: -loss.tokens)[:_MAX_TURNS_NAMED]
    return Finding(
        kind=fault.kind,
        path=fault.path,
        text=f"{what}{_PARTS.get(fault.part, '')}: {fault.tokens:,} tokens that were the"
        f" same as before had to be sent anew in {times}.",
        change=change,
        tokens=fault.tokens,
        multiples=round(fault.tokens * 0.9, 1),
        nano=None if rates is None else fault.tokens * (rates.input - rates.read),
        prefill_seconds=None if rate is None else round(fault.tokens * rate, 3),
        num_turns=fault.turns,
        turns=[loss.turn for loss in dearest],
        earlier=[loss.earlier for loss in dearest],
    )


def _short_finding(short: Sequence[Observation], longest: int, min_tokens: int) -> Finding:
    return Finding(
        kind="too_short",
        path="cache_control",
        text=f"{counted(len(short), 'request marks', 'requests mark')} a prefix of at most"
        f" {longest:,} tokens. The shortest that is held has {min_tokens:,}.",
        change="Mark a longer prefix, or leave the marker out.",
        tokens=longest,
        multiples=0.0,
        num_turns=len(short),
        turns=_spread(short),
    )


def _unread_finding(marked: Sequence[Observation], usage: InputUsage) -> Finding:
    return Finding(
        kind="changing_end",
        path="cache_control",
        text=f"{len(marked):,} requests wrote {usage.written_tokens:,} tokens and none was"
        " read: what is marked never comes again in time.",
        change="Leave the marker out.",
        tokens=usage.written_tokens,
        multiples=round(usage.write_premium, 1),
        num_turns=len(marked),
        turns=_spread(marked),
    )


def _prewarm(
    chosen: Sums,
    ways: Sequence[tuple[Placement | None, Sums]],
    turns: Sequence[Observation],
    rate: float | None,
) -> Prewarm:
    """Whether pre-warms would have paid.

    Turns race when one writes what another is still writing. A pre-warm is a request that is sent
    before them and writes it, so that all of them read it. The savings are against the `chosen`
    markers. A pre-warm may need the markers of another one of the `ways`. `rate` is in seconds of
    prefill per token.
    """

    def worth(sums: Sums) -> float:
        """What pre-warms would have saved before the races, in prices of input tokens."""
        return max(sums.raced * 1.15 - sums.first_raced * 0.1, 0.0)

    way, best = min(ways, key=lambda candidate: candidate[1].multiples - worth(candidate[1]))
    saved = chosen.multiples - (best.multiples - worth(best))
    pays = worth(best) > 0 and saved > LEAST_GAIN * chosen.multiples
    rates = turns[0].rates
    nano = None
    outcome = best if pays else chosen
    if pays and rates is not None and chosen.nano is not None and best.nano is not None:
        cheaper = best.raced * (rates.write("5m") - rates.read) - best.first_raced * rates.read
        nano = chosen.nano - (best.nano - cheaper)
    saves = Amount(
        tokens=best.raced + best.first_raced if pays else 0,
        multiples=round(saved, 1) if pays else 0.0,
        nano=nano,
        prefill_seconds=None if rate is None else round(best.first_raced * rate, 3),
    )
    requests = counted(outcome.num_races, "request")
    races = f"{requests} wrote {outcome.raced:,} tokens that another was writing"
    text = f"A pre-warm does not pay: {races}, which is less than it would cost."
    if not outcome.num_races:
        text = (
            "A pre-warm saves no money: no request wrote what another one was writing."
            " It would only spare the first request its wait."
        )
    elif pays and saved > 0:
        text = (
            f"A pre-warm pays: {races}. It would have saved the price of {saved:,.0f} input tokens."
        )
    return Prewarm(
        pays=pays,
        num_races=outcome.num_races,
        saves=saves,
        text=text,
        markers=_markers(way) if pays and way is not None else [],
    )


def _spread(turns: Sequence[Observation]) -> list[str]:
    """The ids of some of the turns, spread over all of them."""
    step = max(1, len(turns) // _MAX_TURNS_NAMED)
    return [turn.id for turn in turns[::step]][:_MAX_TURNS_NAMED]

"""A whole plan: one pass for the exact curve, the simulated fleets, and, with a target, each GPU's
fewest engines, found by doubling and bisection.

The time of a GPU is what was timed on it, where the list or the request has that for the planned
model, else an estimate from its data sheet: a computed token takes 2 x (the parameters that compute
it) operations at PREFILL_SHARE of the dense peak, a decode step reads the weights at DECODE_SHARE
of the bandwidth. GPUs of one engine (tensor parallel) add up at TOGETHER_SHARE.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import msgspec

from gateway.base.errors import InvalidRequest
from gateway.planner.bench import MAX_STRETCH, Bench, Fleet, side_by_side, stretch_of
from gateway.planner.engine import STEP_TOKENS
from gateway.planner.fleet import Hopeless, Tell
from gateway.planner.requests import Requests, distances, unit_for
from gateway.planner.sizes import GIB, Sizes, sizes_of
from gateway.planning import traffic
from gateway.structs.advice import Change, FleetAnswer, KvFigures, LruPoint, Plan, Point

PREFILL_SHARE, DECODE_SHARE, TOGETHER_SHARE = 0.4, 0.6, 0.8
"""The first is about what the native engine took on an H100 (scripts/bench/README.md: 39 %)."""
KV_SHARE = 0.1
"""The least part of an engine's memory for keys and values; else it takes more GPUs."""
MAX_SEARCH_SECONDS = 60.0
MAX_COPIED_TURNS, SEARCH_TURNS = 2_000, 1_000
_GROUPS = (1, 2, 4, 8)


class _OutOfTime(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Engines of one GPU: `answer` as long as their number is not known, `job` with their memory
    and times, and what one GPU costs an hour."""

    answer: FleetAnswer
    per_hour: float
    job: traffic.Job
    sizes: Sizes


def at_rate(
    turns: Sequence[traffic.Turn], rate: float | None
) -> tuple[Sequence[traffic.Turn], str | None]:
    """The traffic with so many requests a second in its busiest stretch, and what was done to it.
    Copies are of other tenants. What is not a whole copy is made up by the times between
    requests."""
    if rate is None:
        return turns, None
    busiest = stretch_of(turns, SEARCH_TURNS)
    factor = rate * max(busiest[-1].at - busiest[0].at, 1e-3) / len(busiest)
    copies = min(max(round(factor), 1), MAX_COPIED_TURNS)
    pace = factor / copies
    if copies > 1:
        turns = stretch_of(turns, max(MAX_COPIED_TURNS // copies, 1))
    start, num_ids = turns[0].at, max(max(turn.ids) for turn in turns) + 1
    num_scopes = max(turn.scope for turn in turns) + 1
    # Copies begin apart, so that they do not come in one moment.
    apart = (turns[-1].at - start) / len(turns)
    made = [
        msgspec.structs.replace(
            turn,
            at=(turn.at - start + apart * copy / copies) / pace,
            scope=turn.scope + copy * num_scopes,
            ids=[number + copy * num_ids for number in turn.ids],
        )
        for copy in range(copies)
        for turn in turns
    ]
    made.sort(key=lambda turn: turn.at)
    part = stretch_of(made, SEARCH_TURNS)
    return made, (
        f"For {rate:g} requests a second there are {copies:,} times as many tenants, and the times"
        f" between requests go {pace:.3g} times as fast; the busiest {len(part):,} requests, by"
        f" which fleets are chosen, last {part[-1].at - part[0].at:,.0f} s."
    )


def search(
    job: traffic.Job,
    turns: Sequence[traffic.Turn],
    distinct_tokens: int,
    reuse: float,
    tell: Callable[[float], None],
) -> list[FleetAnswer]:
    """The answer of each GPU, those that reach the target first, the cheapest before others.
    `reuse` is the share of prompt tokens that enough memory would give."""
    target = job.asked.target
    assert target is not None
    stretch, unit = stretch_of(turns, SEARCH_TURNS), unit_for(turns, may_be_exact=True)
    offers, unfit = list[Offer](), list[FleetAnswer]()
    for choice in job.asked.gpus or [traffic.GpuChoice(name=name) for name in traffic.known_gpus()]:
        found = _offer(choice, job, stretch)
        if isinstance(found, Offer):
            offers.append(found)
        else:
            unfit.append(found)
    # Engines that are busy all the time with what must be computed.
    computed = sum(turn.ends[-1] + turn.tail for turn in stretch) * (1 - reuse)
    steps = sum(turn.output for turn in stretch) / job.asked.max_running
    lasts = max(stretch[-1].at - stretch[0].at, 1.0)
    guesses = {
        offer.answer.gpu: math.ceil(
            (computed * offer.job.computed_us / 1e6 + steps * offer.job.step_ms / 1e3) / lasts
        )
        for offer in offers
    }
    # The likely answers first: time may run out.
    offers.sort(key=lambda offer: guesses[offer.answer.gpu] * offer.per_hour)
    ends, done = time.monotonic() + MAX_SEARCH_SECONDS, 0
    is_cut = len(stretch) < len(turns)

    def work(number: int, tell_turns: Tell) -> FleetAnswer:
        offer = offers[number]
        bench = Bench(offer.job, offer.sizes, unit, distinct_tokens)
        requests = bench.requests(stretch, is_warmed=is_cut)
        asked, points, too_few = offer.job.asked, dict[int, Point](), 0

        def in_time(count: int = 0) -> None:
            if time.monotonic() > ends:
                raise _OutOfTime

        def reaches(engines: int) -> bool:
            nonlocal too_few
            in_time()
            fleet = Fleet.of(asked, f"{engines} × {offer.answer.title}", engines)
            with suppress(Hopeless):
                found = bench.point(fleet, requests, in_time, target.first_token_p95)
                if reaches_all(found, target):
                    points[engines] = found
                    return True
            too_few = engines
            return False

        answer, why = offer.answer, ""
        try:
            if fewest(reaches, guesses[answer.gpu], traffic.MAX_ENGINES) is None:
                why = f"{traffic.MAX_ENGINES} engines do not reach the target"
        except _OutOfTime:
            # What reaches it is an answer, though fewer may do as well.
            why = f"not looked at to the end: more than {too_few} are needed"
        best = min(points, default=None)
        answer = msgspec.structs.replace(answer, why=why, engines=best)
        if best is not None:
            price = best * answer.gpus_per_engine * offer.per_hour
            answer = msgspec.structs.replace(answer, per_hour=price, point=points[best])
        tell_turns(1)
        return answer

    def told(count: int) -> None:
        nonlocal done
        done += count
        tell(done / len(offers))

    answers = side_by_side(len(offers), work, FleetAnswer, told) if offers else []
    return sorted(
        [*answers, *unfit],
        key=lambda each: (each.engines is None, each.per_hour or 0.0, each.engines or 0),
    )


def fewest(reaches: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The fewest that reach the target, where more reach it too. None where `most` do not."""
    low, high = 0, min(max(guess, 1), most)
    while not reaches(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    return low + 1 + bisect_left(range(low + 1, high), True, key=reaches)


def reaches_all(point: Point, target: traffic.Target) -> bool:
    kept, leased = point.promise_kept, 1 - (point.best_effort or 0.0)
    return (
        not point.refused
        and point.first_token_p95 <= target.first_token_p95
        and (target.promise_kept is None or kept is None or kept >= target.promise_kept)
        and (target.leased is None or leased >= target.leased)
    )


def check(asked: traffic.PlanRequest) -> None:
    """Raise InvalidRequest with what is wrong, before anything is computed."""
    if asked.target is None:
        if asked.gpus is not None:
            raise InvalidRequest("gpus: they are compared by a `target`")
        sizes_of(asked)
        return
    if asked.prefill_us is not None or asked.decode_ms is not None:
        raise InvalidRequest("prefill_us: with a target, give a GPU's times in `gpus`")
    known = traffic.known_gpus()
    if wrong := next((each.name for each in asked.gpus or () if each.name not in known), None):
        raise InvalidRequest(f"gpus: no GPU {wrong!r} is known: {', '.join(known)}")
    sizes_of(msgspec.structs.replace(asked, device_gib=65_536.0))


def _offer(
    choice: traffic.GpuChoice, job: traffic.Job, stretch: Sequence[traffic.Turn]
) -> Offer | FleetAnswer:
    """The smallest group of this GPU with room for the model and its prompts."""
    gpu = traffic.known_gpus()[choice.name]
    longest = max(turn.ends[-1] + turn.tail + turn.output for turn in stretch)
    gib = gpu.memory_gb * 1e9 / GIB
    answer = FleetAnswer(
        gpu=choice.name,
        title=gpu.title,
        gpus_per_engine=_GROUPS[-1],
        engines=None,
        per_hour=None,
        device_gib=_GROUPS[-1] * gib,
        prefill_us=0.0,
        decode_ms=0.0,
        is_measured=False,
        speed="",
        why=f"{_GROUPS[-1]} of it have no room for the model and its keys and values",
    )
    for group in _GROUPS:
        asked = msgspec.structs.replace(job.asked, device_gib=group * gib, engines=1)
        try:
            sizes = sizes_of(asked)
        except InvalidRequest:
            continue
        room = sizes.kv_bytes / sizes.bytes_per_token
        if room > 2 * longest and sizes.kv_bytes > KV_SHARE * asked.device_gib * GIB:
            break
    else:
        return answer
    assert sizes.active_parameters is not None
    together = group * (TOGETHER_SHARE if group > 1 else 1.0)
    prefill_us = 2 * sizes.active_parameters / (gpu.tflops * PREFILL_SHARE * together) / 1e6
    decode_ms = sizes.weights_gib * GIB / (gpu.bandwidth_gbs * DECODE_SHARE * together) / 1e6
    speed = f"Estimated from {gpu.source}"
    measured = gpu.measured.get(asked.model) if asked.config is None and group == 1 else None
    if measured is not None:
        prefill_us, decode_ms = measured.prefill_us, measured.decode_ms
        speed = f"Measured: {measured.source}"
    if choice.prefill_us is not None or choice.decode_ms is not None:
        prefill_us = choice.prefill_us or prefill_us
        decode_ms = decode_ms if choice.decode_ms is None else choice.decode_ms
        both = choice.prefill_us is not None and choice.decode_ms is not None
        speed = "As given" if both else f"Partly as given. {speed}"
    timed = msgspec.structs.replace(asked, prefill_us=prefill_us, decode_ms=decode_ms)
    return Offer(
        answer=msgspec.structs.replace(
            answer,
            gpus_per_engine=group,
            device_gib=asked.device_gib,
            prefill_us=prefill_us,
            decode_ms=decode_ms,
            is_measured=not speed.startswith("Estimated"),
            speed=speed,
            why="",
        ),
        per_hour=gpu.per_hour if choice.per_hour is None else choice.per_hour,
        job=msgspec.structs.replace(job, asked=timed),
        sizes=sizes,
    )


def chosen_job(job: traffic.Job, answers: Sequence[FleetAnswer]) -> tuple[traffic.Job, str]:
    """The job of the first answer, to plan on with, and the answer in words. Raise InvalidRequest
    where no fleet reaches the target."""
    first = answers[0]
    if first.engines is None or first.point is None or first.per_hour is None:
        told = "; ".join(f"{each.title}: {each.why}" for each in answers)
        raise InvalidRequest(f"target: no fleet of these GPUs reaches it. {told}")
    asked = msgspec.structs.replace(
        job.asked,
        device_gib=first.device_gib,
        engines=first.engines,
        prefill_us=first.prefill_us,
        decode_ms=first.decode_ms,
    )
    each = f", each of {first.gpus_per_engine} GPUs" if first.gpus_per_engine > 1 else ""
    return msgspec.structs.replace(job, asked=asked), (
        f"{first.engines} engine{'s' * (first.engines > 1)} of {first.title}{each}: first token p95"
        f" {first.point.first_token_p95:.3g} s, at ${first.per_hour:,.2f} an hour by the prices"
        " given."
    )


KNEE_SHARE = 0.95
TERABYTE_GIB = 1e12 / GIB
_LRU_SIZES = 40
_LRU_WORK, _SEARCH_WORK = 0.15, 0.6
"""The part of the work that the exact curve is, roughly, and that both are with a search."""
_INT8_SCALES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
TellShare = Callable[[float], None]
Kind = Literal["engine", "disk", "int8", "memory"]
_WHAT: dict[Kind, str] = {
    "engine": "One more engine",
    "memory": "Twice the memory for keys and values",
    "disk": "One more terabyte of disk on each engine",
    "int8": "Keys and values in int8",
}


def plan(job: traffic.Job, tell: TellShare) -> Plan:
    """Raise InvalidRequest with the field that is wrong. `tell` hears the share that is done."""
    began = time.monotonic()
    asked = job.asked
    turns: Sequence[traffic.Turn] = job.turns
    if asked.trace is not None:
        turns = traffic.of_trace(asked.trace.splitlines())
    elif asked.made is not None:
        turns = traffic.made_up(asked.made)
    if not turns:
        raise InvalidRequest(
            "since_ms: no request of this range had an answer: there is no traffic to plan for"
        )
    check(asked)
    tell(0.0)
    target, scaled = asked.target, None
    if target is not None:
        turns, scaled = at_rate(turns, target.requests_per_second)
    unit = unit_for(turns)
    made = Requests(unit, with_names=False)
    requests = [made.of(turn) for turn in turns]
    exact = distances(requests, sum(len(request.units) for request in requests))
    tell(_LRU_WORK)
    ceiling = exact.read / max(exact.prompt, 1)
    answers, answer = [], ""
    if target is not None:
        distinct = exact.num_distinct * unit
        answers = search(job, turns, distinct, ceiling, lambda share: tell(share * _SEARCH_WORK))
        job, answer = chosen_job(job, answers)
        asked = job.asked
    sizes = sizes_of(asked)
    bytes_per_unit = unit * sizes.bytes_per_token
    bench = Bench(job, sizes, unit_for(turns, may_be_exact=True), exact.num_distinct * unit)
    base = Fleet.of(asked, "As asked", asked.engines)
    whole = replace(base, is_whole=True)
    memory = [
        replace(base, label=f"{scale:g} times the memory", kv_scale=scale)
        for scale in (0.25, 0.5, 1.0, 2.0, 4.0)
        if target is None or scale >= 1.0  # less than the fewest falls behind
    ]
    fewer = {max(base.engines - 1, 1)} if target is None else set[int]()
    counts = sorted({*fewer, base.engines, base.engines + 1, 2 * base.engines})
    engines = [
        replace(base, label=f"{count} engine{'s' * (count > 1)}", engines=count)
        for count in counts
        if count <= 2 * traffic.MAX_ENGINES
    ]
    tiers, buys = _by_tiers(base), _buys(base)
    stretch = stretch_of(turns, MAX_STRETCH if target is None else SEARCH_TURNS)
    before = _LRU_WORK if target is None else _SEARCH_WORK
    at = _points(
        bench,
        turns,
        stretch,
        [whole, base, *memory, *engines, *tiers, *buys.values()],
        lambda share: tell(before + (1 - before) * share),
    )
    marked = [turn.ends[turn.marks[-1][0]] for turn in turns if turn.marks]
    lease = round(median(marked)) if marked else None
    device_tokens = bench.tokens_of(bench.device_gib(base), base)
    kv = KvFigures(
        bytes_per_token=sizes.bytes_per_token,
        kv_gib=round(bench.device_gib(base), 3),
        weights_gib=round(sizes.weights_gib, 3),
        device_tokens=device_tokens,
        host_tokens=bench.tokens_of(base.host_gib, base),
        disk_tokens=bench.tokens_of(base.disk_gib, base),
        lease_tokens=lease,
        leases_that_fit=int(device_tokens * asked.lease_share) // lease if lease else None,
    )
    knee_gib, here = exact.size_for(KNEE_SHARE) * bytes_per_unit / GIB, kv.kv_gib * asked.engines
    top = max(max(exact.tokens, default=0) + 1, 8)
    units = sorted({max(round(top * (n / _LRU_SIZES) ** 2), 1) for n in range(1, _LRU_SIZES + 1)})
    hours = (turns[-1].at - turns[0].at) / 3600
    lasted = f"{hours:,.1f} hours" if hours >= 2 else f"{hours * 60:,.1f} minutes"
    tokens = traffic.total_tokens(turns)
    text = f"Simulated: {len(turns):,} requests with {tokens:,} prompt tokens over {lasted}."
    if len(stretch) < len(turns):
        text += (
            f" The curves compare the busiest {len(stretch):,} requests in a row, of which the"
            " first fifth only fills the memory."
        )
    return Plan(
        text=text,
        answer_text=answer,
        answers=answers,
        warnings=_warnings(job, sizes),
        assumptions=[*_assumptions(job, sizes, unit), *([] if scaled is None else [scaled])],
        turns=len(turns),
        prompt_tokens=tokens,
        distinct_tokens=exact.num_distinct * unit,
        stretch_turns=len(stretch),
        kv=kv,
        whole=at[whole],
        memory=[at[fleet] for fleet in memory],
        engines=[at[fleet] for fleet in engines],
        tiers=[at[fleet] for fleet in tiers],
        lru=[
            LruPoint(gib=count * bytes_per_unit / GIB, reuse_rate=share)
            for count, share in zip(units, exact.curve(units), strict=True)
        ],
        ceiling=ceiling,
        knee_gib=knee_gib,
        knee_text=f"{knee_gib:,.2f} GiB for keys and values give 95 % of what unlimited memory"
        f" would ({ceiling:.1%} of the prompt tokens); there are {here:,.2f} GiB. More memory"
        + (" pays." if knee_gib > here else " adds little."),
        buys=[_change(kind, at[base], at[fleet]) for kind, fleet in buys.items()],
        seconds=time.monotonic() - began,
    )


def _assumptions(job: traffic.Job, sizes: Sizes, unit: int) -> list[str]:
    asked = job.asked
    if asked.prefill_us is not None:
        told = "as given"
    elif job.prefill_us is not None:
        told = f"as the quickest quarter of {job.timed_turns:,} requests of the ledger took it"
    else:
        told = "assumed: give prefill_us"
    found = [
        f"To compute a token of a prompt takes {job.computed_us:,.1f} µs ({told}), a decode"
        f" step {job.step_ms:,.3g} ms.",
        f"Keys and values take {sizes.bytes_per_token:,} bytes a token in {asked.kv_dtype}, on a"
        f" memory of {sizes.kv_bytes / 2**30:,.1f} GiB an engine.",
        f"Scheduler, pool, leases and placement are the product's own, with {unit} tokens a block;"
        " model and time are simulated.",
        "Each engine has its own host memory and disk. Copies take 10 GB/s from the host and 2 GB/s"
        " from disk.",
        f"An engine computes at most {STEP_TOKENS:,} tokens of prompts in a step.",
    ]
    if not sizes.is_weights_given:
        found.append(
            f"Weights take {sizes.weights_gib:,.1f} GiB in 16 bits, and buffers"
            f" {sizes.spared_gib:,.1f} GiB; weights_gib overrides both."
        )
    return found


def _warnings(job: traffic.Job, sizes: Sizes) -> list[str]:
    """Where times of the ledger stand for a model or a device that they were not measured on."""
    if job.prefill_us is None or job.asked.prefill_us is not None:
        return []
    asked, found = job.asked, []
    for each in job.measured_on:
        known = each.kv_bytes_per_token
        is_other = known not in (0, sizes.bytes_per_token)
        if asked.config is None:
            is_other |= not _letters(each.model).startswith(_letters(asked.model))
        if not is_other and each.device not in ("", "cpu"):
            continue
        width = f" ({known:,} bytes a token)" if known else ""
        device = {"": "a device that is not known", "cpu": "a CPU"}.get(each.device, each.device)
        planned = "the pasted config" if asked.config is not None else asked.model
        found.append(
            f"The times were measured with {each.model}{width} on {device}. This plan is of"
            f" {planned} ({sizes.bytes_per_token:,} bytes a token) on {asked.device_gib:g} GiB: set"
            " a target, which takes each GPU's own times, or give the time of a token's prefill"
            " (prefill_us) and of a decode step (decode_ms)."
        )
    return found


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.rpartition("/")[2].lower())).removeprefix("meta")


def _change(kind: Kind, before: Point, after: Point) -> Change:
    sides = [
        (
            f"{each.hit_rate:.1%}",
            f"{wait * 1000:,.0f} ms" if wait < 1 else f"{wait:,.2f} s",
            "–" if each.promise_kept is None else f"{each.promise_kept:.1%}",
        )
        for each in (before, after)
        for wait in (each.first_token_p95,)
    ]
    rate, wait, kept = (
        one if one == other else f"{one} → {other}" for one, other in zip(*sides, strict=True)
    )
    told = "changes nothing: " if sides[0] == sides[1] else ""
    text = f"{_WHAT[kind]}: {told}hit rate {rate}, first token p95 {wait}, promise kept {kept}."
    return Change(kind=kind, text=text, before=before, after=after)


def _by_tiers(base: Fleet) -> list[Fleet]:
    """Each with what the tiers above it have."""
    found = [replace(base, label="Device alone", host_gib=0.0, disk_gib=0.0)]
    if base.host_gib:
        found.append(replace(base, label="With host memory", disk_gib=0.0))
    if base.disk_gib:
        found.append(replace(base, label="With host and disk" if base.host_gib else "With disk"))
    more = base.disk_gib + TERABYTE_GIB
    found.append(replace(base, label="With one terabyte more of disk", disk_gib=more))
    return found


def _buys(base: Fleet) -> dict[Kind, Fleet]:
    """What may be bought next."""
    one_more = base.engines + 1
    found: dict[Kind, Fleet] = {
        "engine": replace(base, label=f"{one_more} engines", engines=one_more),
        "memory": replace(base, label="2 times the memory", kv_scale=2.0),
        "disk": _by_tiers(base)[-1],
    }
    if scale := _INT8_SCALES.get(base.kv_dtype):
        label = "Keys and values in int8"
        found["int8"] = replace(base, label=label, token_scale=scale, kv_dtype="int8")
    return found


def _points(
    bench: Bench,
    turns: Sequence[traffic.Turn],
    stretch: Sequence[traffic.Turn],
    fleets: Sequence[Fleet],
    tell: TellShare,
) -> dict[Fleet, Point]:
    """What is equal by its capacities, since more than enough is the same, is simulated once."""
    is_cut = len(stretch) < len(turns)

    def like(fleet: Fleet) -> tuple[object, ...]:
        costs = bench.costs(fleet)
        return fleet.engines, bench.capacities(fleet), costs, fleet.is_whole and is_cut

    chosen = list({like(fleet): fleet for fleet in reversed(fleets)}.values())[::-1]
    whole = bench.requests(turns, is_warmed=False)
    part = bench.requests(stretch, is_warmed=True) if is_cut else whole
    total = sum(len(whole if fleet.is_whole else part) for fleet in chosen)
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        tell(min(done / total, 1.0))

    def point(number: int, tell_turns: Tell) -> Point:
        fleet = chosen[number]
        return bench.point(fleet, whole if fleet.is_whole else part, tell_turns)

    found = side_by_side(len(chosen), point, Point, told)
    by = {like(fleet): point for fleet, point in zip(chosen, found, strict=True)}
    return {
        fleet: msgspec.structs.replace(by[like(fleet)], **bench.about(fleet)) for fleet in fleets
    }

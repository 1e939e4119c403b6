"""How many engines of which GPU reach a target: each GPU's fewest, found by doubling and bisection.

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
from dataclasses import dataclass

import msgspec

from gateway.admin.structs.advice import FleetAnswer, Point
from gateway.base.errors import InvalidRequest
from gateway.planner.bench import Bench, Fleet, side_by_side, stretch_of
from gateway.planner.fleet import Hopeless
from gateway.planner.requests import exact_unit_for
from gateway.planner.sizes import GIB, Sizes, sizes_of
from gateway.planning.traffic import (
    MAX_ENGINES,
    GpuChoice,
    Job,
    PlanRequest,
    Target,
    Turn,
    known_gpus,
)

PREFILL_SHARE, DECODE_SHARE, TOGETHER_SHARE = 0.4, 0.6, 0.8
"""The first is about what the native engine took on an H100 (scripts/bench/README.md: 39 %)."""
KV_SHARE = 0.1
"""The least part of an engine's memory for keys and values; else it takes more GPUs."""
MAX_SEARCH_SECONDS = 60.0
MAX_COPIED_TURNS, SEARCH_TURNS = 2_000, 1_000
_GROUPS = (1, 2, 4, 8)
Tell = Callable[[int], None]


class _OutOfTime(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Engines of one GPU: `answer` as long as their number is not known, `job` with their memory
    and times, and what one GPU costs an hour."""

    answer: FleetAnswer
    per_hour: float
    job: Job
    sizes: Sizes


def at_rate(turns: Sequence[Turn], rate: float | None) -> tuple[Sequence[Turn], str | None]:
    """The traffic with so many requests a second in its busiest stretch, and what was done to it.

    Copies are of other tenants. What is not a whole copy is made up by the times between requests.
    """
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
    job: Job,
    turns: Sequence[Turn],
    distinct_tokens: int,
    reuse: float,
    tell: Callable[[float], None],
) -> list[FleetAnswer]:
    """The answer of each GPU, those that reach the target first, the cheapest before others.

    `reuse` is the share of prompt tokens that enough memory would give.
    """
    target = job.asked.target
    assert target is not None
    stretch, unit = stretch_of(turns, SEARCH_TURNS), exact_unit_for(turns)
    offers, unfit = list[Offer](), list[FleetAnswer]()
    for choice in job.asked.gpus or [GpuChoice(name=name) for name in known_gpus()]:
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
            fleet = Fleet(
                label=f"{engines} × {offer.answer.title}",
                engines=engines,
                host_gib=asked.host_gib,
                disk_gib=asked.disk_gib,
                kv_dtype=asked.kv_dtype,
            )
            with suppress(Hopeless):
                found = bench.point(fleet, requests, in_time, target.first_token_p95)
                if reaches_all(found, target):
                    points[engines] = found
                    return True
            too_few = engines
            return False

        answer, why = offer.answer, ""
        try:
            if fewest(reaches, guesses[answer.gpu], MAX_ENGINES) is None:
                why = f"{MAX_ENGINES} engines do not reach the target"
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


def reaches_all(point: Point, target: Target) -> bool:
    kept, leased = point.promise_kept, 1 - (point.best_effort or 0.0)
    return (
        not point.refused
        and point.first_token_p95 <= target.first_token_p95
        and (target.promise_kept is None or kept is None or kept >= target.promise_kept)
        and (target.leased is None or leased >= target.leased)
    )


def check(asked: PlanRequest) -> None:
    """Raise InvalidRequest with what is wrong, before anything is computed."""
    if asked.target is None:
        if asked.gpus is not None:
            raise InvalidRequest("gpus: they are compared by a `target`")
        sizes_of(asked)
        return
    if asked.prefill_us is not None or asked.decode_ms is not None:
        raise InvalidRequest("prefill_us: with a target, give a GPU's times in `gpus`")
    known = known_gpus()
    if wrong := next((each.name for each in asked.gpus or () if each.name not in known), None):
        raise InvalidRequest(f"gpus: no GPU {wrong!r} is known: {', '.join(known)}")
    sizes_of(msgspec.structs.replace(asked, device_gib=65_536.0))


def _offer(choice: GpuChoice, job: Job, stretch: Sequence[Turn]) -> Offer | FleetAnswer:
    """The smallest group of this GPU with room for the model and its prompts."""
    gpu = known_gpus()[choice.name]
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


def chosen_job(job: Job, answers: Sequence[FleetAnswer]) -> tuple[Job, str]:
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

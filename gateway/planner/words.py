"""The sentences of a plan. Pure."""

from collections.abc import Sequence
from typing import Literal

from gateway.admin.structs.advice import Point
from gateway.planner.engine import STEP_TOKENS
from gateway.planner.sizes import Sizes
from gateway.planning.traffic import Job, Turn, total_tokens

Kind = Literal["engine", "disk", "int8", "memory"]
_WHAT: dict[Kind, str] = {
    "engine": "One more engine",
    "memory": "Twice the memory for keys and values",
    "disk": "One more terabyte of disk on each engine",
    "int8": "Keys and values in int8",
}


def about(turns: Sequence[Turn], stretch: Sequence[Turn]) -> str:
    hours = (turns[-1].at - turns[0].at) / 3600
    text = (
        f"Simulated: {len(turns):,} requests with {total_tokens(turns):,} prompt tokens over"
        f" {hours:,.1f} hours."
    )
    if len(stretch) < len(turns):
        text += (
            f" The curves compare the busiest {len(stretch):,} requests in a row, of which the"
            " first fifth only fills the memory."
        )
    return text


def assumptions(job: Job, sizes: Sizes, unit: int) -> list[str]:
    asked = job.asked
    if asked.prefill_us is not None:
        told = "as given"
    elif job.prefill_us is not None:
        told = f"as the quickest quarter of {job.timed_turns:,} requests of the ledger took it"
    else:
        told = "assumed: give prefill_us"
    found = [
        f"A computed token takes {job.computed_us:,.1f} µs ({told}), a decode step"
        f" {job.step_ms:,.3g} ms.",
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


def knee(gib: float, here: float, ceiling: float) -> str:
    text = (
        f"{gib:,.2f} GiB for keys and values give 95 % of what unlimited memory would"
        f" ({ceiling:.1%} of the prompt tokens); there are {here:,.2f} GiB."
    )
    if gib > here:
        return f"{text} More memory pays."
    return f"{text} More memory adds little."


def change(kind: Kind, before: Point, after: Point) -> str:
    return (
        f"{_WHAT[kind]}: hit rate {before.hit_rate:.1%} → {after.hit_rate:.1%},"
        f" first token p95 {_seconds(before.first_token_p95)} →"
        f" {_seconds(after.first_token_p95)}, promise kept {_share(before.promise_kept)} →"
        f" {_share(after.promise_kept)}."
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.2f} s"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"

"""The native engine on a GPU: is it exact, how fast is it, and how much memory does it take?

    scripts/gpu_check [--out DIR]      a GPU; writes gpu_check.json and gpu_check.md
    scripts/gpu_check --interpret      exactness alone, with Triton's interpreter on a CPU

It fetches nothing. The speed is that of a model of Llama 3 8B's shape with random weights in
bfloat16, which are made on the device. What was found out so far is in both files at any time.
"""

import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.gpu.report import Report, failure_of
from scripts.setup.options import parse

if TYPE_CHECKING:
    import torch

    from scripts.gpu.exactness import Comparison

# No part begins later than the second; comparisons, which mostly wait for Triton's compiler, end
# with the first. A part that hangs ends the process with the third.
EXACT_SECONDS, LIMIT_SECONDS, HARD_SECONDS = 240.0, 440.0, 530.0


def main() -> int:
    options = parse(
        __doc__,
        interpret=(False, "exactness alone, on a CPU"),
        small=(False, "a tiny model, also without a GPU: to try this script"),
        out=(".", "folder of the JSON and the Markdown"),
    )
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    import torch

    begun = time.perf_counter()
    if options.interpret:
        report = Report(None, {})
        exactness(torch.device("cpu"), report, float("inf"))
        return 1 if report.has_failed else 0
    is_gpu = torch.cuda.is_available()
    if not is_gpu and not options.small:
        print("there is no GPU here: not run (--interpret: exactness on a CPU)")
        return 2
    from scripts.gpu import speed

    device = torch.device("cuda" if is_gpu else "cpu")
    chip = torch.cuda.get_device_name() if is_gpu else "no GPU"
    report = Report(Path(options.out), {"chip": chip, "torch": torch.__version__})
    sizes = speed.small() if options.small else speed.llama_8b()
    faulthandler.dump_traceback_later(HARD_SECONDS, exit=True)
    try:
        if is_gpu and (
            failure := failure_of(lambda: exactness(device, report, begun + EXACT_SECONDS))
        ):
            report.fail("exact", failure)
        speed.measure(report, begun + LIMIT_SECONDS, sizes, device)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 1 if report.has_failed else 0


def exactness(device: "torch.device", report: Report, deadline: float) -> None:
    """Print each comparison, and report whether all are within what is allowed."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    worst, wrong, right, skipped = 0.0, 0, 0, 0
    for what, compare, allowed in comparisons(device):
        if time.perf_counter() > deadline:
            skipped += 1
            continue
        found: list[float] = []
        failure = failure_of(lambda: found.append(compare()))  # noqa: B023 - called at once
        is_right = not failure and found[0] <= allowed
        wrong, right = wrong + (not is_right), right + is_right
        worst = max([worst, *(difference / allowed for difference in found)])
        told = failure or f"{found[0]:.1e}"
        print(f"{'ok   ' if is_right else 'WRONG'} {told} {what}", flush=True)
    report.facts["exact"] = not wrong
    report.has_failed |= wrong > 0
    report.add(
        "comparisons with plain attention",
        f"{right} right, {wrong} wrong, {skipped} not run; the largest difference is {worst:.2f} of"
        " what is allowed",
    )


def comparisons(device: "torch.device") -> "Iterator[tuple[*Comparison, float]]":
    """Each with what is allowed; the type that a GPU serves with comes first."""
    import torch

    from scripts.gpu import exactness as exact

    is_gpu = device.type == "cuda"
    shapes = exact.SHAPES if is_gpu else exact.FEW_SHAPES
    num_tokens, sizes = (150, exact.SMALL) if is_gpu else (60, exact.SMALLER)

    def kernels(dtype: torch.dtype) -> "Iterator[tuple[*Comparison, float]]":
        for what, compare in exact.kernel_comparisons(device, dtype, shapes):
            yield f"{dtype} {what}", compare, exact.ALLOWED[dtype]

    if is_gpu:
        yield from kernels(torch.bfloat16)
        yield from kernels(torch.float16)
    for what, compare in exact.model_comparisons(device, num_tokens, sizes):
        yield f"model {what}", compare, 1e-4
    yield from kernels(torch.float32)


if __name__ == "__main__":
    sys.exit(main())

"""Makes a step over static memory repeatable: as a CUDA graph, or as the step itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from engine.compute.errors import ModelRefused

Launch = Callable[[], object]
"""Runs a captured step again, over the present contents of its memory."""


class Capture(Protocol):
    """Captures a step. The step must read and write the same memory each time it runs."""

    def __call__(self, step: Callable[[], None]) -> Launch:
        """Capture the step. It may run meanwhile. Raise ModelRefused if it can't be captured."""
        ...


class PlainCapture:
    """For a device without graphs. The step itself runs again, launch by launch."""

    def __call__(self, step: Callable[[], None]) -> Launch:
        return step


class CudaCapture:
    """Captures graphs of one device. They use the same memory, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], None]) -> Launch:
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            # The first run compiles kernels, and libraries take their memory. Neither may happen
            # in a capture.
            step()
            with _no_waiting():
                step()
        outside.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph,
                pool=self._memory,
                stream=self._stream,
                # Other threads may use the device meanwhile.
                capture_error_mode="thread_local",
            ):
                step()
        except RuntimeError as error:
            raise _refused(error) from error
        return graph.replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise ModelRefused if the host waits for the device inside this context.

    Torch counts an operation as waiting if the host must ask the device for a number, such as the
    size of a result.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        raise _refused(error) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _refused(error: RuntimeError) -> ModelRefused:
    why = str(error).strip().partition("\n")[0]
    return ModelRefused(f"ENGINE_CUDA_GRAPHS: a decode step of this model can't be captured: {why}")

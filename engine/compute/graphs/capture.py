"""How a step over static memory is made to run again: as a CUDA graph, or as it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from engine.compute.errors import ModelRefused

Launch = Callable[[], object]
"""Runs a captured step again, over what stands in its memory now."""


class Capture(Protocol):
    """Takes a step that reads and writes the same memory whenever it runs."""

    def __call__(self, step: Callable[[], None]) -> Launch:
        """Raises ModelRefused for a step that can't be captured. The step may run meanwhile."""
        ...


class PlainCapture:
    """For a device without graphs: the step itself runs again, launch by launch."""

    def __call__(self, step: Callable[[], None]) -> Launch:
        return step


class CudaCapture:
    """Graphs of one device, whose steps use the same memory one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], None]) -> Launch:
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            # Kernels are compiled and libraries take their memory, which no capture may do.
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
                # Other threads may talk to the device meanwhile.
                capture_error_mode="thread_local",
            ):
                step()
        except RuntimeError as error:
            raise _refused(error) from error
        return graph.replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Within, what waits for the device is an error. Raises ModelRefused.

    Torch counts as waiting each operation whose result's shape, or whose next operation, the host
    must ask the device for.
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

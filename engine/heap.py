"""Memory of this process: free pages go back, and what stays is made without the collector."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Around what makes many objects that stay.

    The collector would look through all of them again and again, at each fourth part more.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def trim_heap() -> None:
    """Give the free pages of the C library's heap back (malloc_trim(3)).

    By itself glibc gives back the end of the heap only, so a small block that was made late in a
    flood keeps all the pages of the flood. Other C libraries have no such call and need none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""This process's memory: gives free pages back, and makes lasting objects without the collector."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """A context without the collector, for code that makes many lasting objects.

    The collector would look through all of them each time that they have grown by a quarter.
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

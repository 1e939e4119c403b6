"""Free memory of the C library goes back to the system."""

import ctypes


def trim_heap() -> None:
    """Give the free pages of the C library's heap back (malloc_trim(3)).

    By itself glibc gives back the end of the heap only, so a small block that was made late in a
    flood keeps all the pages of the flood. Other C libraries have no such call and need none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Whole numbers of 32 bits in memory that several processes share.

One process writes a word and others read it. A word is written and read whole.
"""

import mmap
import os
import tempfile

WORD_BYTES = 4
MAX_WORD = 0xFFFF_FFFF


def make_words(num_words: int) -> int:
    """The descriptor of new memory, all zeros, which child processes may inherit."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("words")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_words * WORD_BYTES)
    return descriptor


def words_at(descriptor: int, num_words: int) -> "memoryview[int]":
    return memoryview(mmap.mmap(descriptor, num_words * WORD_BYTES)).cast("I")

"""Fleets in several processes, which end with their parent's group."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized

import msgspec

from gateway.admin.structs.advice import Point

MAX_PROCESSES = 2
Work = Callable[[int, Callable[[int], None]], Point]


def points_of(num: int, work: Work, tell: Callable[[int], None]) -> list[Point]:
    """`work(number, tell)` of each number, two at a time. `tell` hears of turns that are done.

    The processes are forks, so that the traffic is not copied.
    """
    context = multiprocessing.get_context("fork")
    processes = min(MAX_PROCESSES, os.cpu_count() or 1, num)
    taken = context.Value("i", 0)
    readers = []
    gc.freeze()
    for _ in range(processes):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(num, work, taken, writer), daemon=True)
        process.start()
        writer.close()
        readers.append(reader)
    found = _gather(readers, tell)
    if len(found) < num:
        raise RuntimeError("a process of the simulation has ended early")
    return [found[number] for number in range(num)]


def _gather(readers: Sequence[Connection], tell: Callable[[int], None]) -> dict[int, Point]:
    found, left = {}, list(readers)
    while left:
        for ready in wait(left):
            assert isinstance(ready, Connection)
            try:
                number, told = ready.recv()
            except EOFError:
                left.remove(ready)
                continue
            if number is None:
                tell(told)
            else:
                found[number] = msgspec.msgpack.decode(told, type=Point)
    return found


def _serve(num: int, work: Work, taken: "Synchronized[int]", writer: Connection) -> None:
    # Nothing of a simulation is garbage before its end, but collecting looks at all of it.
    gc.disable()
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= num:
            return
        point = work(number, lambda count: writer.send((None, count)))
        writer.send((number, msgspec.msgpack.encode(point)))
        gc.collect()

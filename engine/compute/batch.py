"""One step's sequences, packed into one row of tokens, and where each finds its keys and values.

A paged kernel gets tiles (`attention/tiles.py`). Blocks that several sequences with one new token
begin with are read once for all there, as Hydragen and cascade inference do (arXiv 2402.05099).
Torch's functions attend to sequences with several new tokens one by one. Those with one are padded
and attended to together (`DecodeGroup`), so that padding at most doubles the gathered blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.attention.tiles import Run, Shared, Table, Tiles, cut
from engine.schedule.runner import Work
from engine.sizing import blocks_for

# Below this number the extra calls cost more than reading the shared blocks once per sequence.
_MIN_SAVED_TOKENS = 512
_MAX_GATHERED_BLOCKS = 4096
"""Of one group: a share of a long document is as many rows over one table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Sequences with one new token each."""

    # (sequences): their places in the packed row.
    rows: torch.Tensor
    # (sequences): the new tokens' positions.
    positions: torch.Tensor
    # The least position.
    earliest: int
    # (sequences, most blocks of any): their tables, padded with the first block.
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A packed row of tokens.

    Either there are tiles for the paged kernel, or chunks and groups for torch's functions.
    """

    token_ids: torch.Tensor
    # Each token's place among its sequence's slots.
    positions: torch.Tensor
    # Each token's place in its prompt: later than `positions` behind a compressed prefix.
    rotary: torch.Tensor
    # Where each token's keys and values go.
    slots: torch.Tensor
    # The indexes of the tokens behind which is drawn.
    sampled: torch.Tensor
    # Sequences with several new tokens, each with its blocks.
    chunks: Sequence[tuple[Run, torch.Tensor]] = ()
    decode_groups: Sequence[DecodeGroup] = ()
    tiles: Tiles | None = None


def _table_of(work: Work, block_size: int) -> Table:
    """The blocks that a work reads and writes. Raises ValueError for too short a table."""
    needed = blocks_for(work.start + len(work.token_ids), block_size)
    if len(work.block_table) < needed:
        raise ValueError(f"a table of {len(work.block_table)} blocks, {needed} needed")
    return np.array(work.block_table[:needed], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """One step's sequences in a row of tokens, in the host's memory."""

    token_ids: NDArray[np.int64]
    # These are `Batch`'s.
    positions: NDArray[np.int64]
    rotary: NDArray[np.int64]
    slots: NDArray[np.int64]
    sampled: NDArray[np.int64]
    # Sequences with several new tokens.
    runs: Sequence[Run]
    # Sequences with one.
    decoding: Sequence[Run]
    block_size: int

    def cut(self, tile_rows: int, *, share: bool) -> Tiles:
        """The tiles of the step, shared ones where `share`; `tile_rows` is a wide tile's width."""
        shared: list[Shared] = []
        single = list(self.decoding)
        if share:
            shared, single = _find_shared(self.decoding, self.block_size)
        return cut([*self.runs, *single], shared, len(self.token_ids), self.block_size, tile_rows)


def pack(works: Sequence[Work], block_size: int) -> PackedStep:
    """Raises ValueError for a work without tokens or with too short a table."""
    num_tokens = sum(len(work.token_ids) for work in works)
    token_ids: list[int] = []
    sampled: list[int] = []
    positions = np.empty(num_tokens, dtype=np.int64)
    slots = np.empty(num_tokens, dtype=np.int64)
    rotary = np.empty(num_tokens, dtype=np.int64)
    runs: list[Run] = []
    decoding: list[Run] = []
    for work in works:
        begin = len(token_ids)
        count = len(work.token_ids)
        if not count:
            raise ValueError("a work has no tokens")
        end = begin + count
        table = _table_of(work, block_size)
        token_ids.extend(work.token_ids)
        run = Run(begin, count, work.start, table)
        if count == 1:
            decoding.append(run)
            positions[begin] = work.start
            block, slot = divmod(work.start, block_size)
            slots[begin] = table[block] * block_size + slot
        else:
            runs.append(run)
            span = np.arange(work.start, work.start + count)
            positions[begin:end] = span
            slots[begin:end] = table[span // block_size] * block_size + span % block_size
        rotary[begin:end] = positions[begin:end] + work.cut
        if work.sample is not None:
            sampled.extend(range(end - 1 - len(work.draft), end))
    return PackedStep(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        rotary=rotary,
        slots=slots,
        sampled=np.array(sampled, dtype=np.int64),
        runs=runs,
        decoding=decoding,
        block_size=block_size,
    )


def build_batch(
    works: Sequence[Work],
    block_size: int,
    device: torch.device,
    *,
    share: bool = True,
    tile_rows: int | None = None,
) -> Batch:
    """Pack a step, and cut it into tiles of `tile_rows` for a kernel, shared ones where `share`.

    Raises ValueError for a work without tokens or with too short a table.
    """
    packed = pack(works, block_size)
    batch = Batch(
        token_ids=torch.from_numpy(packed.token_ids).to(device),
        positions=torch.from_numpy(packed.positions).to(device),
        rotary=torch.from_numpy(packed.rotary).to(device),
        slots=torch.from_numpy(packed.slots).to(device),
        sampled=torch.from_numpy(packed.sampled).to(device),
    )
    if tile_rows is not None:
        return replace(batch, tiles=packed.cut(tile_rows, share=share))
    return replace(
        batch,
        chunks=[(run, torch.from_numpy(run.table).to(device)) for run in packed.runs],
        decode_groups=_group_decodes(packed.decoding, device),
    )


def _find_shared(decoding: Sequence[Run], block_size: int) -> tuple[list[Shared], list[Run]]:
    """The groups that share their first blocks, and the other sequences.

    Sorting puts tables that begin alike side by side. A group grows while that saves more reading.
    """
    groups: list[Shared] = []
    for run in sorted(decoding, key=lambda run: run.table.tobytes()):
        if groups:
            group = groups[-1].runs
            num = groups[-1].num_blocks
            length = min(len(group[-1].table), len(run.table))
            differing = np.flatnonzero(group[-1].table[:length] != run.table[:length])
            common = int(differing[0]) if len(differing) else length
            new = min(num, run.start // block_size, common)
            if len(group) * new >= max((len(group) - 1) * num, 1):
                groups[-1] = Shared([*group, run], new)
                continue
        groups.append(Shared([run], run.start // block_size))
    shared = list[Shared]()
    single = list[Run]()
    for candidate in groups:
        num_saved = (len(candidate.runs) - 1) * candidate.num_blocks * block_size
        if num_saved >= _MIN_SAVED_TOKENS:
            shared.append(candidate)
        else:
            single.extend(candidate.runs)
    return shared, single


def _group_decodes(decoding: Sequence[Run], device: torch.device) -> list[DecodeGroup]:
    groups: list[list[Run]] = []
    for item in sorted(decoding, key=lambda item: len(item.table), reverse=True):
        widest = len(groups[-1][0].table) if groups else 0
        is_like = 2 * len(item.table) >= widest
        if groups and is_like and len(groups[-1]) * widest < _MAX_GATHERED_BLOCKS:
            groups[-1].append(item)
        else:
            groups.append([item])
    padded: list[DecodeGroup] = []
    for group in groups:
        # Padding repeats a block of the same sequence, so no other sequence's numbers are read.
        blocks = np.stack([np.resize(item.table[:1], len(group[0].table)) for item in group])
        for row, item in zip(blocks, group, strict=True):
            row[: len(item.table)] = item.table
        starts = [item.start for item in group]
        padded.append(
            DecodeGroup(
                rows=torch.tensor([item.begin for item in group], device=device),
                positions=torch.tensor(starts, device=device),
                earliest=min(starts),
                blocks=torch.from_numpy(blocks).to(device),
            )
        )
    return padded

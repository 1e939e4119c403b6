"""One step's sequences, packed into one row of tokens, and the places of their keys and values.

A paged kernel gets tiles (`attention/tiles.py`). Several sequences with one new token may begin
with the same blocks. A shared tile reads such blocks once for all of these sequences, as Hydragen
and cascade inference do (arXiv 2402.05099).

Torch's functions attend each sequence with several new tokens by itself. Sequences with one new
token are padded and attended together (`DecodeGroup`). Padding at most doubles the blocks that are
gathered.
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
"""A group that gathers this many blocks gets no more sequences. Blocks that several of its
sequences share are gathered once for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Sequences with one new token each."""

    # (sequences). Their places in the packed row.
    rows: torch.Tensor
    # (sequences). The positions of the new tokens.
    positions: torch.Tensor
    # The least of the positions.
    earliest: int
    # (sequences, blocks of the longest table). Each table is padded with its own first block.
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A packed row of tokens.

    It has either tiles for a paged kernel, or chunks and groups for torch's functions.
    """

    # (tokens).
    token_ids: torch.Tensor
    # (tokens). Each token's place among its sequence's slots.
    positions: torch.Tensor
    # (tokens). Each token's position in its prompt. Behind a compressed prefix it is greater than
    # the place in `positions`.
    rotary: torch.Tensor
    # (tokens). The flat slot to which each token's keys and values are written.
    slots: torch.Tensor
    # (draws). The places of the tokens after which a token is drawn.
    sampled: torch.Tensor
    # Sequences with several new tokens, each with its blocks.
    chunks: Sequence[tuple[Run, torch.Tensor]] = ()
    # Sequences with one new token.
    decode_groups: Sequence[DecodeGroup] = ()
    # None: torch's functions attend.
    tiles: Tiles | None = None


def _table_of(work: Work, block_size: int) -> Table:
    """The blocks that a work reads and writes. Raises ValueError for too short a table."""
    needed = blocks_for(work.start + len(work.token_ids), block_size)
    if len(work.block_table) < needed:
        raise ValueError(f"a table of {len(work.block_table)} blocks, {needed} needed")
    return np.array(work.block_table[:needed], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """One step's sequences in a row of tokens, in the host's memory.

    Its arrays mean the same as those of `Batch`.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rotary: NDArray[np.int64]
    slots: NDArray[np.int64]
    sampled: NDArray[np.int64]
    # Sequences with several new tokens.
    runs: Sequence[Run]
    # Sequences with one new token.
    decoding: Sequence[Run]
    block_size: int

    def cut(self, tile_rows: int, *, share: bool) -> Tiles:
        """Cut the step into tiles. A wide tile has at most `tile_rows` rows.

        With `share` there are tiles for the first blocks that several sequences share.
        """
        shared: list[Shared] = []
        single = list(self.decoding)
        if share:
            shared, single = _find_shared(self.decoding, self.block_size)
        return cut([*self.runs, *single], shared, len(self.token_ids), self.block_size, tile_rows)


def pack(works: Sequence[Work], block_size: int) -> PackedStep:
    """Pack a step. Raise ValueError for a work without tokens or with too short a table."""
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
    """Pack a step on the device. With `tile_rows` it is cut for a kernel, as `PackedStep.cut` does.

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
    """The groups of sequences that share their first blocks, and the sequences in no group.

    Sorting puts tables with the same beginning side by side. A group takes the next sequence unless
    that makes the blocks it saves fewer.
    """
    groups: list[Shared] = []
    for run in sorted(decoding, key=lambda run: run.table.tobytes()):
        if groups:
            group = groups[-1].runs
            num_blocks = groups[-1].num_blocks
            length = min(len(group[-1].table), len(run.table))
            differing = np.flatnonzero(group[-1].table[:length] != run.table[:length])
            common = int(differing[0]) if len(differing) else length
            num_with_run = min(num_blocks, run.start // block_size, common)
            if len(group) * num_with_run >= max((len(group) - 1) * num_blocks, 1):
                groups[-1] = Shared([*group, run], num_with_run)
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
    """Groups of sequences. Within a group no table is longer than twice another."""
    groups: list[list[Run]] = []
    for run in sorted(decoding, key=lambda run: len(run.table), reverse=True):
        widest = len(groups[-1][0].table) if groups else 0
        is_similar = 2 * len(run.table) >= widest
        if groups and is_similar and len(groups[-1]) * widest < _MAX_GATHERED_BLOCKS:
            groups[-1].append(run)
        else:
            groups.append([run])
    decode_groups: list[DecodeGroup] = []
    for group in groups:
        # Padding repeats a block of the same sequence, so no other sequence's numbers are read.
        blocks = np.stack([np.resize(run.table[:1], len(group[0].table)) for run in group])
        for row, run in zip(blocks, group, strict=True):
            row[: len(run.table)] = run.table
        starts = [run.start for run in group]
        decode_groups.append(
            DecodeGroup(
                rows=torch.tensor([run.begin for run in group], device=device),
                positions=torch.tensor(starts, device=device),
                earliest=min(starts),
                blocks=torch.from_numpy(blocks).to(device),
            )
        )
    return decode_groups

"""One step's sequences, packed into one row of tokens, and where each finds its keys and values.

Sequences with several new tokens are attended to one by one (`Chunk`); those with one new token
are padded and attended to together (`DecodeGroup`), grouped so that padding at most doubles the
gathered blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.runner import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Row tokens [begin, end) are positions [start, start + end - begin) of one sequence."""

    begin: int
    end: int
    start: int
    blocks: torch.Tensor

    @property
    def context_tokens(self) -> int:
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Sequences with one new token each.

    `rows` (sequences) are their places in the packed row, `positions` (sequences) the new
    tokens' positions, the least of which is `earliest`, `blocks` (sequences, most blocks of any)
    their tables, padded with the table's first block.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    earliest: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`slots` (tokens) are where the new keys and values go; `sampled` indexes the last tokens."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampled: torch.Tensor
    chunks: Sequence[Chunk]
    decode_groups: Sequence[DecodeGroup]


def build_batch(works: Sequence[Work], block_size: int, device: torch.device) -> Batch:
    """Pack a step. Raises ValueError for a work without tokens or with too short a table."""
    token_ids: list[int] = []
    sampled: list[int] = []
    positions: list[torch.Tensor] = []
    slots: list[torch.Tensor] = []
    chunks: list[Chunk] = []
    decoding: list[tuple[int, Work]] = []
    for work in works:
        begin, end = len(token_ids), len(token_ids) + len(work.token_ids)
        table = _table_tensor(work, block_size)
        span = torch.arange(work.start, work.start + len(work.token_ids))
        positions.append(span)
        slots.append(table[span // block_size] * block_size + span % block_size)
        token_ids.extend(work.token_ids)
        if work.sample is not None:
            sampled.append(end - 1)
        if end - begin == 1:
            decoding.append((begin, work))
        else:
            chunk = Chunk(begin=begin, end=end, start=work.start, blocks=table.to(device))
            chunks.append(chunk)
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        sampled=torch.tensor(sampled, dtype=torch.long, device=device),
        chunks=chunks,
        decode_groups=_group_decodes(decoding, block_size, device),
    )


def _table_tensor(work: Work, block_size: int) -> torch.Tensor:
    if not work.token_ids:
        raise ValueError("a work has no tokens")
    needed = _num_blocks(work, block_size)
    if len(work.block_table) < needed:
        raise ValueError(f"a table of {len(work.block_table)} blocks, {needed} needed")
    return torch.tensor(work.block_table[:needed], dtype=torch.long)


def _num_blocks(work: Work, block_size: int) -> int:
    return -(-(work.start + len(work.token_ids)) // block_size)


def _group_decodes(
    decoding: Sequence[tuple[int, Work]], block_size: int, device: torch.device
) -> list[DecodeGroup]:
    by_length = sorted(decoding, key=lambda item: item[1].start, reverse=True)
    groups: list[list[tuple[int, Work]]] = []
    for item in by_length:
        longest = _num_blocks(groups[-1][0][1], block_size) if groups else 0
        if 2 * _num_blocks(item[1], block_size) >= longest > 0:
            groups[-1].append(item)
        else:
            groups.append([item])
    return [_pad_group(group, block_size, device) for group in groups]


def _pad_group(
    group: Sequence[tuple[int, Work]], block_size: int, device: torch.device
) -> DecodeGroup:
    longest = _num_blocks(group[0][1], block_size)
    tables: list[list[int]] = []
    for _, work in group:
        table: list[int] = list(work.block_table[: _num_blocks(work, block_size)])
        # Padding repeats a block of the same sequence: nobody else's numbers are ever read.
        tables.append(table + [table[0]] * (longest - len(table)))
    return DecodeGroup(
        rows=torch.tensor([row for row, _ in group], device=device),
        positions=torch.tensor([work.start for _, work in group], device=device),
        earliest=min(work.start for _, work in group),
        blocks=torch.tensor(tables, device=device),
    )

"""The memory that decode graphs read and write. It is allocated once and never moves."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.attention.placed import PlacedTiles
from engine.compute.attention.tiles import Tiles
from engine.compute.batch import Batch, PackedStep
from engine.compute.graphs.rule import GraphSize
from engine.compute.sampler import DrawColumns, is_greedy, uniform
from engine.schedule.runner import SampleParams

_TILE = 6
"""The numbers of one tile (`Tiles`)."""
# The rows of `StepBuffers`' array of integers, and of its array of floats.
_TOKEN, _POSITION, _ROTARY, _SLOT, _TOP_K, _GREEDY = range(6)
_HEAT, _TOP_P, _MIN_P, _NUMBER = range(4)


class Mirrored:
    """A tensor on the device, and its copy in the host's memory.

    On a GPU the copy is in pinned memory. So the host need not wait for a transfer to the device.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        # The host's copy, for reading and writing.
        self.numbers = self.host.numpy()

    def send(self, count: int | None = None) -> None:
        """Copy the first `count` elements to the device; None: all. The host does not wait.

        The numbers may be changed again only after the device was waited for.
        """
        self.device[:count].copy_(self.host[:count], non_blocking=True)

    def fetch(self) -> None:
        """Copy all numbers to the host. The host waits for the device."""
        self.host.copy_(self.device)


class StepBuffers:
    """The input of one decode step: tokens, positions, slots, tiles, and how to draw.

    Rows that belong to no sequence have token 0 at position 0. They attend to nothing and write to
    the scratch slot.
    """

    def __init__(
        self,
        most_rows: int,
        most_parts: int,
        *,
        blocks_a_part: int,
        scratch_slot: int,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._scratch_slot = scratch_slot
        self._vocabulary = vocabulary
        self._integers = Mirrored((6, most_rows), torch.int64, device)
        self._floats = Mirrored((4, most_rows), torch.float64, device)
        self._table = Mirrored((most_parts * blocks_a_part,), torch.int32, device)
        self._tiles = Mirrored(((most_parts + most_parts // 2) * _TILE,), torch.int32, device)
        self._rows = Mirrored((most_parts,), torch.int32, device)
        self._parts = Mirrored((most_parts,), torch.int32, device)
        self._offsets = Mirrored((most_rows + 1,), torch.int32, device)
        self._positions = Mirrored((most_rows,), torch.int32, device)
        self._every_row = torch.arange(most_rows, device=device)
        # A capture may run its step before any step was sent.
        self._integers.numbers[_SLOT] = scratch_slot
        self._integers.send()

    @property
    def mirrored(self) -> Sequence[Mirrored]:
        """All tensors that are sent to the device."""
        return [
            self._integers,
            self._floats,
            self._table,
            self._tiles,
            self._rows,
            self._parts,
            self._offsets,
            self._positions,
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes on the device. The host's pinned memory takes as many."""
        return sum(mirrored.device.nbytes for mirrored in self.mirrored)

    def batch(self, size: GraphSize) -> Batch:
        """The packed row that a graph of this size reads."""
        row = self._integers.device[:, : size.rows]
        return Batch(
            token_ids=row[_TOKEN],
            positions=row[_POSITION],
            rotary=row[_ROTARY],
            slots=row[_SLOT],
            sampled=self._every_row[: size.rows],
        )

    def placed(self, size: GraphSize) -> PlacedTiles:
        """The tiles that a graph of this size reads."""
        return PlacedTiles(
            rows=self._rows.device[: size.parts],
            table=self._table.device,
            tiles=self._tiles.device[: size.tiles * _TILE].view(size.tiles, _TILE),
            num_wide=size.wide_tiles,
            offsets=self._offsets.device[: size.rows + 1],
            parts=self._parts.device[: size.parts],
            positions=self._positions.device[: size.rows],
        )

    def columns(self, rows: slice) -> DrawColumns:
        """The parameters of these rows' draws."""
        floats = self._floats.device[:, rows, None]
        top_k = self._integers.device[_TOP_K, rows, None]
        return DrawColumns(floats[_HEAT], floats[_TOP_P], floats[_MIN_P], floats[_NUMBER], top_k)

    def greedy(self, rows: slice) -> torch.Tensor:
        """Whether each of these rows takes the likeliest token (rows)."""
        return self._integers.device[_GREEDY, rows] > 0

    def send(
        self,
        size: GraphSize,
        packed: PackedStep,
        tiles: Tiles,
        params: Sequence[SampleParams],
        positions: Sequence[int],
    ) -> None:
        """Write a step for the graph of this size, which has room for it. The host does not wait.

        `params` and `positions` (rows) say how each row's token is drawn.
        """
        num = len(packed.token_ids)
        integers = self._integers.numbers
        integers[:, num : size.rows] = 0
        integers[_SLOT, num : size.rows] = self._scratch_slot
        integers[_TOKEN, :num] = packed.token_ids
        integers[_POSITION, :num] = packed.positions
        integers[_ROTARY, :num] = packed.rotary
        integers[_SLOT, :num] = packed.slots
        self._positions.numbers[: size.rows] = integers[_POSITION, : size.rows]
        if size.draws:
            self._set_draws(size.rows, params, positions)
        self._integers.send()
        self._positions.send(size.rows)
        self._set_tiles(size, tiles)

    def _set_draws(
        self, rows: int, params: Sequence[SampleParams], positions: Sequence[int]
    ) -> None:
        integers = self._integers.numbers
        floats = self._floats.numbers
        # Greedy rows and rows of no sequence are drawn with these values. The draw is not used.
        floats[:, :rows] = 1.0
        integers[_TOP_K, :rows] = self._vocabulary
        integers[_GREEDY, :rows] = 1
        for row, (draw, position) in enumerate(zip(params, positions, strict=True)):
            if is_greedy(draw):
                continue
            integers[_GREEDY, row] = 0
            integers[_TOP_K, row] = draw.top_k or self._vocabulary
            number = uniform(draw.seed, position)
            floats[:, row] = (draw.temperature, draw.top_p, draw.min_p, number)
        self._floats.send()

    def _set_tiles(self, size: GraphSize, tiles: Tiles) -> None:
        of_tiles = self._tiles.numbers[: size.tiles * _TILE].reshape(size.tiles, _TILE)
        num_wide = size.wide_tiles
        of_tiles[:] = 0
        of_tiles[: len(tiles.wide)] = tiles.wide
        of_tiles[num_wide : num_wide + len(tiles.narrow)] = tiles.narrow
        self._tiles.send(size.tiles * _TILE)
        num_rows = len(tiles.offsets) - 1
        offsets = self._offsets.numbers
        offsets[: num_rows + 1] = tiles.offsets
        offsets[num_rows + 1 : size.rows + 1] = tiles.offsets[-1]
        self._offsets.send(size.rows + 1)
        for mirrored, numbers in (
            (self._rows, tiles.rows),
            (self._parts, tiles.parts),
            (self._table, tiles.table),
        ):
            _set_first(mirrored, numbers)


def _set_first(mirrored: Mirrored, numbers: NDArray[np.int32]) -> None:
    """Write and send the first numbers. The later ones keep their values: no tile points to
    them."""
    mirrored.numbers[: len(numbers)] = numbers
    mirrored.send(len(numbers))

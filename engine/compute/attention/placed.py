"""A step's tiles in the device's memory, as the paged kernels read them."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.compute.attention.tiles import Tiles


@dataclass(frozen=True, slots=True)
class PlacedTiles:
    """`Tiles` as tensors of 32 bits, whose fields have the same names.

    There may be more tiles and rows than the step has. A tile without rows computes nothing. A row
    without parts gets zeros.
    """

    rows: torch.Tensor
    table: torch.Tensor
    # (tiles, 6). The wide tiles come first.
    tiles: torch.Tensor
    num_wide: int
    offsets: torch.Tensor
    parts: torch.Tensor
    # (rows). The positions of the step's tokens.
    positions: torch.Tensor

    @property
    def wide(self) -> torch.Tensor:
        return self.tiles[: self.num_wide]

    @property
    def narrow(self) -> torch.Tensor:
        return self.tiles[self.num_wide :]


def place(tiles: Tiles, positions: torch.Tensor) -> PlacedTiles:
    """Copy tiles to the device on which the positions are."""
    arrays = (
        tiles.rows,
        tiles.table,
        np.concatenate([tiles.wide, tiles.narrow]),
        tiles.offsets,
        tiles.parts,
    )
    rows, table, both, offsets, parts = (
        torch.from_numpy(array).to(positions.device, non_blocking=True) for array in arrays
    )
    return PlacedTiles(
        rows, table, both, len(tiles.wide), offsets, parts, positions.to(torch.int32)
    )

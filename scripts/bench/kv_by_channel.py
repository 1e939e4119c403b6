"""KIVI's way to keep keys in 4 bits, as `kv_dtypes` measures it (arXiv 2402.02750).

Keys of a block are scaled by channel, over all its tokens, once the block is full. Values are
scaled by token. The block that is being filled stays in full precision. The engine has no such
type: a block that another sequence shares in part, or that an entry ends in, would hold other keys
for each of them.

Numbers are rounded where they are read. So this tells the quality, and neither memory nor speed.
"""

import torch

from engine.compute.kv import KvPool
from engine.compute.kv_codecs import new_codec
from engine.compute.runner import TorchRunner

STEPS = 15


class ByChannelPool(KvPool):
    """A pool that keeps all numbers, and gives those of blocks that are not written to rounded.

    A step may write to one block of each sequence.
    """

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self._tails = torch.unique(slots // self.block_size)
        super().write(layer, slots, keys, values)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(layer, blocks)
        shape = (len(blocks), self.block_size, *keys.shape[1:])
        codec = new_codec("int4", self.layout.head_dim)
        assert codec is not None
        is_tail = torch.isin(blocks, self._tails)[:, None, None, None]
        rounded = codec.decode(codec.encode(values), values.dtype)
        return (
            torch.where(is_tail, keys.view(shape), _by_channel(keys.view(shape))).flatten(0, 1),
            torch.where(is_tail, values.view(shape), rounded.view(shape)).flatten(0, 1),
        )


def _by_channel(keys: torch.Tensor) -> torch.Tensor:
    """16 steps from the least number of each channel, over a block's tokens (dimension 1)."""
    least = keys.amin(1, keepdim=True).to(torch.float16).float()
    step = ((keys.amax(1, keepdim=True) - least) / STEPS).clamp(1e-6).to(torch.float16).float()
    return (((keys - least) / step).round().clamp(0, STEPS) * step + least).to(keys.dtype)


def bytes_a_token(pool: KvPool) -> int:
    """Of full blocks. A key's channel has its step and least number in 4 bytes, for a block."""
    layout = pool.layout
    codec = new_codec("int4", layout.head_dim)
    assert codec is not None
    keys = layout.head_dim // 2 + -(-4 * layout.head_dim // pool.block_size)
    return layout.num_layers * layout.num_kv_heads * (codec.num_bytes + keys)


def use(runner: TorchRunner) -> None:
    """Have a runner keep its numbers so."""
    pool = runner.pool
    runner.pool = ByChannelPool(pool.layout, pool.num_blocks, pool.block_size, pool.device)

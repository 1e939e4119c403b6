"""The KV pool: the memory of every block, in every layer.

A pool has `num_blocks` blocks of `block_size` token slots. Block b's slot i is slot
`b * block_size + i` of the flat view. A pool does not know who owns a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch

from engine.cache.ids import BlockId
from engine.cache.store_tier import Payload
from engine.sizing import aligned, blocks_for, head_bytes, int4_groups

KvDtype = Literal["model", "float16", "bfloat16", "fp8_e4m3", "int8", "int4"]
"""The type in which keys and values are kept. `model` is the type that the model computes in."""

_HALF_MAX = 65504.0
_LEAST_SCALE = 1e-6


class KvCodec(NamedTuple):
    """An encoding of one head's numbers in fewer bits than the model's.

    The numbers of one token and one KV head are encoded by themselves. They are encoded when they
    are written, before anything attends to them. So the numbers that are attended to depend on the
    tokens alone. They do not depend on chunks, on who computed them, or on whether a block is full.
    Within one type, a shared, copied, forked or stored block is exact to the bit. KIVI scales keys
    by channel over many tokens instead (arXiv 2402.02750). A block that is not full has no such
    scale.
    """

    # The bytes of one encoded head.
    num_bytes: int
    # Makes bytes (..., num_bytes) of numbers (..., head_dim) of any type.
    encode: Callable[[torch.Tensor], torch.Tensor]
    # Makes numbers (..., head_dim) of the given type of the bytes.
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def new_codec(kv_dtype: KvDtype, head_dim: int) -> KvCodec | None:
    """The codec of a type; None if numbers are kept as the model computes them.

    Raises NotSizable for heads that the type can't keep.
    """
    if kv_dtype == "model":
        return None
    num_bytes = head_bytes(head_dim, kv_dtype)
    if kv_dtype == "int8":
        return KvCodec(num_bytes, _encode_int8, _decode_int8)
    if kv_dtype == "int4":
        groups = int4_groups(head_dim)
        return KvCodec(
            num_bytes, partial(_encode_int4, groups=groups), partial(_decode_int4, groups=groups)
        )
    stored_type = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
    }[kv_dtype]
    largest = torch.finfo(stored_type).max
    return KvCodec(
        num_bytes,
        lambda numbers: _bytes_of(numbers.float().clamp(-largest, largest).to(stored_type)),
        lambda content, dtype: content.view(stored_type).to(dtype),
    )


def _bytes_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def _encode_int8(numbers: torch.Tensor) -> torch.Tensor:
    """Encode as 127 steps to either side of 0, followed by the size of a step in 16 bits."""
    numbers = numbers.float()
    scale = _half(numbers.abs().amax(-1, keepdim=True) / 127)
    steps = (numbers / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([_bytes_of(steps), _bytes_of(scale)], dim=-1)


def _decode_int8(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    steps = content[..., :-2].contiguous().view(torch.int8)
    scale = content[..., -2:].contiguous().view(torch.float16)
    return (steps.float() * scale.float()).to(dtype)


def _encode_int4(numbers: torch.Tensor, groups: int) -> torch.Tensor:
    """Encode as 16 steps from the least number of each group.

    Two steps take a byte. The size of a step and the least number of each group follow.
    """
    grouped = numbers.float().reshape(*numbers.shape[:-1], groups, -1)
    least = grouped.amin(-1, keepdim=True).clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)
    scale = _half((grouped.amax(-1, keepdim=True) - least.float()) / 15)
    steps = ((grouped - least.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8)
    flat = steps.flatten(-2)
    packed = flat[..., 0::2] | (flat[..., 1::2] << 4)
    scales = torch.cat([scale, least], dim=-1).flatten(-2)
    return torch.cat([packed, _bytes_of(scales)], dim=-1)


def _decode_int4(content: torch.Tensor, dtype: torch.dtype, groups: int) -> torch.Tensor:
    packed = content[..., : -4 * groups]
    scales = content[..., -4 * groups :]
    steps = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    shape = (*content.shape[:-1], groups, -1)
    pairs = scales.contiguous().view(torch.float16).reshape(shape).float()
    grouped = steps.reshape(shape).float()
    return (grouped * pairs[..., :1] + pairs[..., 1:]).flatten(-2).to(dtype)


def _half(scale: torch.Tensor) -> torch.Tensor:
    """A scale in 16 bits. It is never 0, even where all numbers are alike: it is a divisor."""
    return scale.clamp(_LEAST_SCALE, _HALF_MAX).to(torch.float16)


STATE_ALIGNMENT = 16
"""In bytes. Each part of a recurrent state begins at a multiple of it."""


class StatePart(NamedTuple):
    """One tensor (1, ...) of a sequence's recurrent state.

    A linear layer has one part for its convolution and one for its recurrence, or several of each.
    """

    # The index of the layer.
    layer: int
    # Whether the part is the convolution's; otherwise it is the recurrence's.
    is_convolution: bool
    # Its number among the layer's parts of the same kind.
    number: int
    # (1, ...).
    shape: tuple[int, ...]
    dtype: torch.dtype
    # The byte of the state at which it begins.
    start: int

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


PIECE_BYTES = 2**30
"""The most bytes of one piece of the host tier's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The shape of one token's keys and values in all layers."""

    # The number of layers that have keys and values of their own.
    num_layers: int
    # The largest number of KV heads of any layer.
    num_kv_heads: int
    # The largest width of a head's keys or values in any layer.
    head_dim: int
    # The type that the model computes in.
    dtype: torch.dtype
    # The type that keys and values are kept in.
    kv_dtype: KvDtype = "model"
    # The width of a latent; None for a model without multi-head latent attention. With latents a
    # token has one head and no values. The head is the latent and, behind it, the rotated part of
    # the key. Both together have `head_dim` numbers.
    latent_rank: int | None = None
    # The place in the pool of each attention layer; None: a layer's index is its place.
    places: Mapping[int, int] | None = None
    # The parts of a sequence's recurrent state. Their size does not depend on its length.
    state_parts: Sequence[StatePart] = ()

    @property
    def place_of(self) -> Mapping[int, int] | range:
        """The place in the pool of each attention layer. Layers that share keys and values have
        the same place."""
        return range(self.num_layers) if self.places is None else self.places

    @property
    def num_planes(self) -> int:
        """The number of tensors: one for keys and one for values in each layer, or one for
        latents."""
        return self.num_layers * (2 if self.latent_rank is None else 1)

    @property
    def codec(self) -> KvCodec | None:
        """The codec of a head's numbers; None if they are kept as the model computes them."""
        return new_codec(self.kv_dtype, self.head_dim)

    @property
    def storage(self) -> tuple[int, torch.dtype]:
        """The last dimension and the type of the tensors that keep a head's numbers."""
        codec = self.codec
        return (self.head_dim, self.dtype) if codec is None else (codec.num_bytes, torch.uint8)

    @property
    def bytes_per_token(self) -> int:
        """Planes x KV heads x bytes of one head's numbers."""
        width, dtype = self.storage
        return self.num_planes * self.num_kv_heads * width * dtype.itemsize

    def bytes_per_block(self, block_size: int) -> int:
        return block_size * self.bytes_per_token

    @property
    def state_bytes(self) -> int:
        """The bytes of one sequence's recurrent state; 0 for a model without linear layers."""
        return sum(aligned(part.num_bytes, STATE_ALIGNMENT) for part in self.state_parts)

    def state_blocks(self, block_size: int) -> int:
        """The number of blocks that a recurrent state takes."""
        return blocks_for(self.state_bytes, self.bytes_per_block(block_size))


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The memory of a pool. All of it is taken now, so a pool that is too large fails at the start.

    The memory must not be left as it is. A slot that the attention mask hides is still multiplied
    by its weight of 0, and 0 x NaN is NaN.
    """
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


class KvPool:
    """For each layer one key and one value tensor (num_blocks, block_size, kv_heads, head_dim).

    With a codec (`KvCodec`) the tensors are bytes. Their last dimension is then the codec's
    `num_bytes`.

    With `has_scratch` the pool has one more block, which the cache does not know. Rows that belong
    to no sequence are written there.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        has_scratch: bool = False,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: {num_blocks} of {block_size} slots")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._codec = layout.codec
        width, dtype = layout.storage
        self.scratch_block = BlockId(num_blocks) if has_scratch else None
        num_all = num_blocks + 1 if has_scratch else num_blocks
        shape = (num_all, block_size, layout.num_kv_heads, width)
        self._all = zeros((layout.num_planes, *shape), dtype, device)
        self.keys = list(self._all[: layout.num_layers])
        # Latents are keys and values at once. The sum over the numbers behind them is not used.
        self.values = list(self._all[-layout.num_layers :])
        self._gather_memory = (self.keys[0][:0], self.values[0][:0])

    @property
    def num_bytes(self) -> int:
        """The bytes that the tensors occupy."""
        return self._all.nbytes

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store tokens' keys and values, each (tokens, kv_heads, head_dim), at flat `slots`."""
        for plane, rows in ((self.keys[layer], keys), (self.values[layer], values)):
            content = rows if self._codec is None else self._codec.encode(rows)
            plane.flatten(0, 1).index_copy_(0, slots, content)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy blocks' keys and values, each (blocks x block_size, kv_heads, head_dim).

        The results are valid until the next call, which uses the same memory. New memory for each
        call would cost more than the copy.
        """
        num = len(blocks)
        if num > len(self._gather_memory[0]):
            shape = (num, *self.keys[0].shape[1:])
            self._gather_memory = (self.keys[0].new_empty(shape), self.values[0].new_empty(shape))
        keys = self._gather_memory[0][:num]
        values = self._gather_memory[1][:num]
        torch.index_select(self.keys[layer], 0, blocks, out=keys)
        torch.index_select(self.values[layer], 0, blocks, out=values)
        if self._codec is not None:
            dtype = self.layout.dtype
            keys = self._codec.decode(keys, dtype)
            values = self._codec.decode(values, dtype)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def slots(self, blocks: torch.Tensor) -> torch.Tensor:
        """The flat slots of blocks, in order."""
        within = torch.arange(self.block_size, device=self.device)
        return (blocks[:, None] * self.block_size + within).flatten()

    def copy_slots(self, layer: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy tokens' keys and values of one layer from flat slots to others."""
        for plane in (self.keys[layer], self.values[layer]):
            rows = plane.flatten(0, 1)
            rows.index_copy_(0, targets, rows[sources])

    @property
    def block_bytes(self) -> int:
        return self.layout.bytes_per_block(self.block_size)

    def read_bytes(self, blocks: Sequence[BlockId]) -> torch.Tensor:
        """A copy of blocks' memory, on the device: bytes (blocks, `block_bytes`)."""
        index = torch.tensor(blocks, device=self.device)
        return self._all.transpose(0, 1).index_select(0, index).flatten(1).view(torch.uint8)

    def write_bytes(self, blocks: Sequence[BlockId], content: torch.Tensor) -> None:
        """Write the memory of blocks. `content` is as `read_bytes` returns it."""
        rows = self._all.transpose(0, 1)
        shape = (len(blocks), *rows.shape[1:])
        index = torch.tensor(blocks, device=self.device)
        rows.index_copy_(0, index, content.contiguous().view(self._all.dtype).view(shape))

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        self._all.index_fill_(1, torch.tensor(blocks, device=self.device), 0)

    def clear_from(self, places: Sequence[tuple[BlockId, int]]) -> None:
        """Write zeros to each block from its slot on."""
        whole = [block for block, slot in places if slot == 0]
        if whole:
            self.clear_blocks(whole)
        for block, slot in places:
            if slot:
                self._all[:, block, slot:].zero_()

    def of_block(self, block: BlockId) -> torch.Tensor:
        """One block's memory (planes, block_size, kv_heads, head_dim): keys, then values."""
        return self._all[:, block]

    def wait(self) -> None:
        """Wait until the device has finished the work it was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks (source, destination) in all layers.

        All sources are read before any destination is written.
        """
        if not pairs:
            return
        sources = torch.tensor([source for source, _ in pairs], device=self.device)
        destinations = torch.tensor([target for _, target in pairs], device=self.device)
        for tensor in self._all:
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def save(self, blocks: Sequence[BlockId]) -> list[memoryview]:
        """A copy of each block, as the pool keeps it: the keys of all layers, then the values.

        The copies share memory, which is freed once none of them is in use.
        """
        if not blocks:
            return []
        return [memoryview(row) for row in self.read_bytes(blocks).cpu().numpy()]

    def load(self, loads: Sequence[tuple[Payload, BlockId]]) -> None:
        """Write payloads of `save` into blocks. Raises ValueError for a payload of another size."""
        for payload, target in loads:
            if len(payload) != self.block_bytes:
                raise ValueError("a payload of another layout")
            content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            self.write_bytes([target], content.to(self.device))


class HostKv:
    """The host tier's memory: blocks of the pool's shape, in pinned memory if the device is a GPU.

    It consists of pieces (blocks, planes, block_size, kv_heads, head_dim). A block is contiguous,
    so copying it is one transfer. A single piece would take up to twice the memory, because torch
    rounds pinned memory up to a power of two.
    """

    def __init__(self, pool: KvPool, num_blocks: int) -> None:
        self._pool = pool
        layout = pool.layout
        width, dtype = layout.storage
        shape = (layout.num_planes, pool.block_size, layout.num_kv_heads, width)
        is_pinned = pool.device.type == "cuda"
        self._blocks_in_piece = max(PIECE_BYTES // layout.bytes_per_block(pool.block_size), 1)
        self._pieces = [
            torch.zeros(
                (min(self._blocks_in_piece, num_blocks - begin), *shape),
                dtype=dtype,
                pin_memory=is_pinned,
            )
            for begin in range(0, num_blocks, self._blocks_in_piece)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def demote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy blocks to the host. A pair is a block of the device and one of the host."""
        for source, target in pairs:
            self._block(target).copy_(self._pool.of_block(source), non_blocking=True)
        self._wait(pairs)

    def promote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy blocks to the device. A pair is a block of the host and one of the device."""
        for source, target in pairs:
            self._pool.of_block(target).copy_(self._block(source), non_blocking=True)
        self._wait(pairs)

    def clear_from(self, places: Sequence[tuple[BlockId, int]]) -> None:
        """Write zeros to each block from its slot on."""
        for block, slot in places:
            self._block(block)[:, slot:].zero_()

    def _block(self, block: BlockId) -> torch.Tensor:
        piece, place = divmod(block, self._blocks_in_piece)
        return self._pieces[piece][place]

    def _wait(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Wait for the copies, because the blocks that were read are reused right after."""
        if pairs:
            self._pool.wait()

"""Types that keys and values are kept in: the model's own, or fewer bits.

Each token's numbers of one KV head are encoded by themselves, when they are written and before
anything attends to them. So what is attended to depends on the tokens alone: not on chunks, on who
computed them, or on whether a block is full. A shared, copied, forked or stored block is exact
within one type, to the bit.

`int8` keeps one scale a head; `int4` keeps a scale and a least value for each group of channels.
vLLM calls such kinds `int8_per_token_head` and `int4_per_token_head`. KIVI scales keys by channel
over many tokens instead (arXiv 2402.02750). A block that is not full has no such scale.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from engine.sizing import head_bytes, int4_groups

KvDtype = Literal["model", "float16", "bfloat16", "fp8_e4m3", "int8", "int4"]
"""`model`: the type that the model computes in."""

_FP8_MAX = 448.0
_HALF_MAX = 65504.0
_LEAST_SCALE = 1e-6


class KvCodec(NamedTuple):
    """How one head's numbers are kept.

    `encode` takes (..., head_dim) of any type to bytes (..., `num_bytes`). `decode` takes them back
    to the type that is given.
    """

    num_bytes: int
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def new_codec(kv_dtype: KvDtype, head_dim: int) -> KvCodec | None:
    """None where numbers are kept as they are. Raises NotSizable for heads that it can't keep."""
    if kv_dtype == "model":
        return None
    num_bytes = head_bytes(head_dim, kv_dtype)
    if kv_dtype == "int8":
        return KvCodec(num_bytes, _encode_int8, _decode_int8)
    if kv_dtype == "int4":
        groups = int4_groups(head_dim)
        return KvCodec(
            num_bytes,
            lambda numbers: _encode_int4(numbers, groups),
            lambda kept, dtype: _decode_int4(kept, dtype, groups),
        )
    kept_as, most = {
        "float16": (torch.float16, _HALF_MAX),
        "bfloat16": (torch.bfloat16, torch.finfo(torch.bfloat16).max),
        "fp8_e4m3": (torch.float8_e4m3fn, _FP8_MAX),
    }[kv_dtype]
    return KvCodec(
        num_bytes,
        lambda numbers: _bytes_of(numbers.float().clamp(-most, most).to(kept_as)),
        lambda kept, dtype: kept.view(kept_as).to(dtype),
    )


def _bytes_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def _encode_int8(numbers: torch.Tensor) -> torch.Tensor:
    """127 steps to either side of 0, and the size of a step in 16 bits."""
    numbers = numbers.float()
    scale = _half(numbers.abs().amax(-1, keepdim=True) / 127)
    steps = (numbers / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([_bytes_of(steps), _bytes_of(scale)], dim=-1)


def _decode_int8(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    steps = kept[..., :-2].contiguous().view(torch.int8)
    scale = kept[..., -2:].contiguous().view(torch.float16)
    return (steps.float() * scale.float()).to(dtype)


def _encode_int4(numbers: torch.Tensor, groups: int) -> torch.Tensor:
    """16 steps from the least number of each group, two in a byte, and then the groups' scales."""
    grouped = numbers.float().reshape(*numbers.shape[:-1], groups, -1)
    least = grouped.amin(-1, keepdim=True).clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)
    scale = _half((grouped.amax(-1, keepdim=True) - least.float()) / 15)
    steps = ((grouped - least.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8)
    flat = steps.flatten(-2)
    packed = flat[..., 0::2] | (flat[..., 1::2] << 4)
    scales = torch.cat([scale, least], dim=-1).flatten(-2)
    return torch.cat([packed, _bytes_of(scales)], dim=-1)


def _decode_int4(kept: torch.Tensor, dtype: torch.dtype, groups: int) -> torch.Tensor:
    packed, scales = kept[..., : -4 * groups], kept[..., -4 * groups :]
    steps = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    of_groups = (*kept.shape[:-1], groups, -1)
    pairs = scales.contiguous().view(torch.float16).reshape(of_groups).float()
    grouped = steps.reshape(of_groups).float()
    return (grouped * pairs[..., :1] + pairs[..., 1:]).flatten(-2).to(dtype)


def _half(scale: torch.Tensor) -> torch.Tensor:
    """A scale in 16 bits. One of 0 would divide by it; all numbers are alike then."""
    return scale.clamp(_LEAST_SCALE, _HALF_MAX).to(torch.float16)

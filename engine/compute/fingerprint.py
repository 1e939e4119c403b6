"""What a model's keys and values depend on besides the tokens."""

from hashlib import blake2b
from sys import byteorder

import torch

from engine.compute.loading import LoadedModel

_PART = 64 * 2**20


def model_facts(loaded: LoadedModel, block_size: int) -> dict[str, str]:
    """Facts to take a fingerprint of: the weights' digest, the layout, what computes them.

    All weights are read: about a second a GB.
    """
    state = blake2b(digest_size=32)
    for name, tensor in sorted(loaded.model.state_dict().items()):
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(flat), _PART):
            state.update(flat[start : start + _PART].cpu().numpy())
    layout = loaded.layout
    # Ways of attention differ in the last bits, and what one computed should go on as it began.
    kernel = loaded.kernel if layout.codec is None else None
    return {
        "weights": state.hexdigest(),
        "class": type(loaded.model).__name__,
        "config": loaded.model.config.to_json_string(use_diff=False),
        "layout": f"{layout.num_layers} {layout.num_kv_heads} {layout.head_dim} {block_size}",
        "dtype": str(layout.dtype),
        "kv dtype": layout.kv_dtype,
        "windows": str(loaded.windows),
        "torch": torch.__version__,
        "device": loaded.device.type,
        "attention": "torch" if kernel is None else type(kernel).__name__,
        "byte order": byteorder,
    }

"""How a key turns when it is copied to another position.

Rotary position embeddings turn a key (arXiv 2104.09864). Where their frequencies do not depend on
the length, the turn depends on the distance alone. Each layer of a model is measured for that. A
single token has the same key at every position, except for the turn.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from engine.compute.loading import LoadedModel
from engine.schedule.runner import Work

_TOLERANCE = 0.02
"""The tolerated difference, as a share of the greatest number of the keys. Rounding to 16 bits
makes a smaller difference, and a wrong turn makes a larger one."""

Style = Literal["none", "halves", "pairs"]
STYLES: tuple[Style, ...] = ("none", "halves", "pairs")


class Turns:
    """How each layer's keys turn: not at all, in two halves, or in neighbouring pairs.

    `frequencies` are in radians for each position. Their number is half of the numbers of a head
    that turn. The numbers behind these do not turn.
    """

    def __init__(self, frequencies: torch.Tensor, styles: Sequence[Style] = ()) -> None:
        self.frequencies = frequencies.double()
        self.styles = styles

    def turned(self, keys: torch.Tensor, distance: int, style: Style) -> torch.Tensor:
        """Keys (..., head_dim) moved by `distance` positions. The turn is computed in float32."""
        if style == "none" or not distance:
            return keys
        angles = self.frequencies * distance
        cos, sin = angles.cos().float(), angles.sin().float()
        num = 2 * len(angles)
        turning = keys[..., :num].float()
        if style == "halves":
            first, second = turning.chunk(2, -1)
            moved = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        else:
            first = turning[..., 0::2]
            second = turning[..., 1::2]
            pair = (first * cos - second * sin, second * cos + first * sin)
            moved = torch.stack(pair, -1).flatten(-2)
        return torch.cat([moved.to(keys.dtype), keys[..., num:]], -1)


@torch.inference_mode()
def find_turns(loaded: LoadedModel) -> Turns | None:
    """How the model's keys turn; None: they can't be moved in any known style."""
    modules = (getattr(module, "inv_freq", None) for module in loaded.model.modules())
    frequencies = next((buffer for buffer in modules if isinstance(buffer, torch.Tensor)), None)
    if frequencies is None or 2 * len(frequencies) > loaded.layout.head_dim:
        return None
    turns = Turns(frequencies.clone())
    runner = loaded.runner(4, 1)
    most = loaded.max_context_tokens - 1
    places = (0, min(3, most), most // 2, most)
    for block, place in enumerate(places):
        runner.execute([Work(token_ids=[1], start=0, block_table=[block], cut=place)])
    styles = list[Style]()
    for layer in range(loaded.layout.num_layers):
        keys = runner.pool.keys[layer][:, 0]
        tolerance = _TOLERANCE * float(keys.float().abs().max())
        fitting = [
            style
            for style in STYLES
            if all(
                float((turns.turned(keys[0], place, style) - keys[block]).abs().max()) <= tolerance
                for block, place in enumerate(places)
            )
        ]
        if not fitting:
            return None
        styles.append(fitting[0])
    return Turns(frequencies, styles)

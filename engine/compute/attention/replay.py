"""Runs tokens over a prefix that is in the pool, and notes what they attend to. Writes nothing.

For scores that need queries. The tokens are the prefix's own, or others behind it. Keys and values
of others are kept from step to step, outside of the pool, so that a long run is cut into steps.
"""

from dataclasses import dataclass, field

import torch

from engine.compute.attention.arithmetic import Layer, attend
from engine.compute.kv import KvPool


@dataclass(slots=True)
class Replay:
    """How tokens run over a prefix that is in memory, and how much they attend to it."""

    pool: KvPool
    # They have the prefix.
    blocks: torch.Tensor
    # The tokens of the prefix.
    num_tokens: int
    # The places of the prefix whose weights are noted.
    columns: range
    # Tokens behind the prefix attend to so many of its first tokens, to the columns and to each
    # other.
    sinks: int = 0
    # The tokens that run are the prefix's own. They attend to all in front of them.
    is_own: bool = False
    # By layer (kv_heads, columns): the most weight that any token behind the prefix and any head
    # gives. Of the prefix's own tokens it is the sum over them of the heads' mean.
    noted: dict[int, torch.Tensor] = field(default_factory=dict)
    behind: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer
    ) -> torch.Tensor:
        """`query` (1, heads, tokens, width), keys and values (1, kv_heads, tokens, width)."""
        kept = self.pool.gather(layer.index, self.blocks)
        keys, values = (rows[: self.num_tokens].transpose(0, 1)[None] for rows in kept)
        device = query.device
        num = query.shape[2]
        places = torch.arange(self.num_tokens, device=device)
        if not self.is_own:
            before = self.behind.get(layer.index)
            if before is not None:
                key = torch.cat([before[0], key], 2)
                value = torch.cat([before[1], value], 2)
            self.behind[layer.index] = key, value
            keys = torch.cat([keys, key], 2)
            values = torch.cat([values, value], 2)
            places = torch.arange(self.num_tokens + key.shape[2], device=device)
        attention_mask = places <= self.positions[:, None]
        heads = query.view(keys.shape[1], -1, num, query.shape[-1])  # by KV head
        among = keys[0]
        if not self.is_own:
            begin = self.columns.start
            end = self.columns.stop
            seen = [*range(self.sinks), *range(begin, end), *range(self.num_tokens, len(places))]
            among = among[:, seen]
            places = places[seen]
        scores = (heads @ among[:, None].transpose(2, 3)).float() * layer.scaling
        weights = scores.masked_fill(places > self.positions[:, None], -torch.inf).softmax(-1)
        weights = weights[..., self.sinks : self.sinks + len(self.columns)]
        if self.is_own:
            weight = weights.mean(1).sum(1)
            self.noted[layer.index] = self.noted.get(layer.index, 0) + weight
        else:
            weight = weights.amax((1, 2))
            earlier = self.noted.get(layer.index, weight)
            self.noted[layer.index] = torch.maximum(earlier, weight)
        return attend(query, keys, values, attention_mask, layer, None)

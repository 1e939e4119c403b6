"""Runs tokens over a prefix in the pool, and notes what they attend to. The pool is not written to.

Some scorers need it, because they need queries. The tokens are the prefix's own, or other tokens
behind the prefix. The keys and values of other tokens are kept from step to step, outside of the
pool. So a long run can be cut into steps.
"""

from dataclasses import dataclass, field

import torch

from engine.compute.attention.arithmetic import Layer, attend
from engine.compute.kv import KvPool


@dataclass(slots=True)
class Replay:
    """Tokens that run over a prefix in the pool, and how much they attend to it."""

    pool: KvPool
    # The blocks that hold the prefix.
    blocks: torch.Tensor
    # The number of the prefix's tokens.
    num_tokens: int
    # The places of the prefix whose weights are noted.
    columns: range
    # The number of the prefix's first tokens that count for tokens behind the prefix. Their weights
    # are shared among these first tokens, the columns and the tokens behind the prefix.
    sinks: int = 0
    # Whether the tokens that run are the prefix's own. Their weights are shared among all tokens in
    # front of them.
    is_own: bool = False
    # By layer (kv_heads, columns). For tokens behind the prefix it is the largest weight that any
    # token and any head gives. For the prefix's own tokens it is the mean over heads, summed over
    # tokens.
    noted: dict[int, torch.Tensor] = field(default_factory=dict)
    # By layer: the keys and values of the tokens behind the prefix that have run.
    behind: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # (tokens). The positions of the tokens of this step.
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer
    ) -> torch.Tensor:
        """Attend the tokens of a step, and note their weights.

        `query` is (1, heads, tokens, width), `key` and `value` are (1, kv_heads, tokens, width).
        The result has the query's shape.
        """
        gathered = self.pool.gather(layer.index, self.blocks)
        keys, values = (rows[: self.num_tokens].transpose(0, 1)[None] for rows in gathered)
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
        weighed = keys[0]
        if not self.is_own:
            begin = self.columns.start
            end = self.columns.stop
            seen = [*range(self.sinks), *range(begin, end), *range(self.num_tokens, len(places))]
            weighed = weighed[:, seen]
            places = places[seen]
        scores = (heads @ weighed[:, None].transpose(2, 3)).float() * layer.scaling
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

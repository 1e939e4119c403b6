"""Linear layers (Gated DeltaNet, Mamba2, short convolutions, KDA) and their recurrent states.

Such a layer keeps its state in a `Cache` of transformers. It can't compute a packed row of several
sequences. So it is called once for each sequence, with a cache of that sequence's own. All
sequences with one new token share one call. The states are read from their blocks before a step,
and written to their blocks after it. They are written as bytes, so a state is exact whatever type
keys and values are kept in.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from engine.cache.recurrent import StateMove
from engine.compute.errors import ModelRefused
from engine.compute.kv import STATE_ALIGNMENT, KvPool, StatePart
from engine.schedule.runner import Work
from engine.sizing import aligned

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")


def state_parts(cache: Cache) -> list[StatePart]:
    """The parts of a state. A forward of one sequence has filled `cache`."""
    parts: list[StatePart] = []
    start = 0
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionLayer):
            continue
        for states in (layer.conv_states, layer.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    is_convolution = states is layer.conv_states
                    shape = tuple(state.shape)
                    parts.append(
                        StatePart(index, is_convolution, number, shape, state.dtype, start)
                    )
                    start += aligned(parts[-1].num_bytes, STATE_ALIGNMENT)
    return parts


class _RunStates(Cache):
    """The states of some sequences, in the form that linear layers read and write."""

    def __init__(self, num_layers: int, parts: Sequence[StatePart], states: torch.Tensor | None):
        """`states` are (sequences, bytes); None where no token was computed yet."""
        numbers = [0] * num_layers
        for part in parts:
            numbers[part.layer] = max(numbers[part.layer], part.number + 1)
        super().__init__(
            layers=[LinearAttentionLayer(number_of_states=max(number, 1)) for number in numbers]
        )
        for part in parts if states is not None else ():
            assert states is not None
            content = states[:, part.start : part.start + part.num_bytes].contiguous()
            state = content.view(part.dtype).view(len(states), *part.shape[1:])
            if part.is_convolution:
                self.update_conv_state(state, part.layer, part.number)
            else:
                self.update_recurrent_state(state, part.layer, part.number)

    def to_bytes(self, parts: Sequence[StatePart], num_bytes: int) -> torch.Tensor:
        """The states as bytes (sequences, `num_bytes`), with zeros behind the last part."""
        tensors: list[torch.Tensor] = []
        for part in parts:
            layer: Any = self.layers[part.layer]
            layer_states = layer.conv_states if part.is_convolution else layer.recurrent_states
            tensors.append(layer_states[part.number].to(part.dtype).contiguous())
        states = tensors[0].new_zeros((len(tensors[0]), num_bytes), dtype=torch.uint8)
        for part, state in zip(parts, tensors, strict=True):
            states[:, part.start : part.start + part.num_bytes] = state.flatten(1).view(torch.uint8)
        return states


class _Run(NamedTuple):
    """One call of a linear layer: for one sequence's tokens, or for several sequences with one new
    token each."""

    # The places of the tokens in the packed row.
    rows: slice | torch.Tensor
    # One for each sequence.
    moves: list[StateMove]
    states: _RunStates


class StepStates:
    """The states of one step's sequences."""

    def __init__(self, works: Sequence[Work], pool: KvPool, num_layers: int) -> None:
        self._pool = pool
        self._parts = pool.layout.state_parts
        self.runs: list[_Run] = []
        begin = 0
        single = []
        for work in works:
            end = begin + len(work.token_ids)
            move = work.state
            assert move is not None, "a work without a state"
            if move.source is not None and end - begin == 1:
                single.append((begin, move))
            else:
                self.runs.append(self._run(slice(begin, end), [move], num_layers))
            begin = end
        if single:
            rows = torch.tensor([row for row, _ in single], device=pool.device)
            self.runs.append(self._run(rows, [move for _, move in single], num_layers))

    def _run(self, rows: slice | torch.Tensor, moves: list[StateMove], num_layers: int) -> _Run:
        states = None
        if moves[0].source is not None:
            blocks = chain.from_iterable(move.source or () for move in moves)
            states = self._pool.read_bytes(list(blocks)).view(len(moves), -1)
        return _Run(rows, moves, _RunStates(num_layers, self._parts, states))

    def keep(self) -> None:
        """Write the states after the step to their blocks."""
        for run in self.runs:
            blocks = list(chain.from_iterable(move.target for move in run.moves))
            num_bytes = len(run.moves[0].target) * self._pool.block_bytes
            states = run.states.to_bytes(self._parts, num_bytes)
            self._pool.write_bytes(blocks, states.view(len(blocks), -1))


class PackedCache(Cache):
    """The cache that a model's layers are given with a packed row.

    An attention layer's keys and values go to the pool (`attention/step.py`), so this cache keeps
    nothing. A linear layer is called with each sequence's own cache (`wrap_linear_layers`).
    """

    def __init__(self, states: StepStates | None = None) -> None:
        super().__init__(layers=[])
        self.states = states

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """False. Models ask this only to make attention masks, and here they make none."""
        return False


def wrap_linear_layers(model: PreTrainedModel, parts: Sequence[StatePart]) -> None:
    """Make each linear layer be called once for each sequence.

    A layer that is already wrapped stays as it is. Raises ModelRefused if a layer of `parts` is not
    found.
    """
    layers = {part.layer for part in parts}
    wrapped = set()
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if index in layers and any(isinstance(child, nn.Conv1d) for child in module.modules()):
            names = signature(type(module).forward).parameters
            name = next((argument for argument in _CACHE_ARGUMENTS if argument in names), None)
            if name is None or "hidden_states" not in names:
                continue
            wrapped.add(index)
            if "forward" not in vars(module):
                module.forward = _by_sequence(module.forward, name)
    lacking = sorted(layers - wrapped)
    if lacking:
        raise ModelRefused(f"layer {lacking[0]} keeps a state in a way that is not known")


def _by_sequence(plain: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    parameters = signature(plain)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = parameters.bind(*args, **kwargs)
        cache = call.arguments.get(name)
        if not isinstance(cache, PackedCache) or cache.states is None:
            return plain(*args, **kwargs)
        whole: torch.Tensor = call.arguments["hidden_states"]
        output: torch.Tensor | None = None
        for rows, moves, run_states in cache.states.runs:
            # (sequences, tokens of each, width)
            part = whole[0, rows].view(len(moves), -1, whole.shape[-1])
            call.arguments["hidden_states"] = part
            call.arguments[name] = run_states
            computed = plain(*call.args, **call.kwargs)
            if output is None:
                output = computed.new_empty((1, whole.shape[1], computed.shape[-1]))
            output[0, rows] = computed.flatten(0, 1)
        assert output is not None
        return output

    return forward

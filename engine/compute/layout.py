"""How a model's weights lie in a CPU's memory: the same numbers and shapes, read faster."""

import torch
from torch import nn


def lay_out(model: nn.Module) -> None:
    """Store each linear layer's weight input by input. Shapes and `state_dict` stay as they are.

    A few rows times such a weight take a half to two thirds of the time: MKL need not turn it
    around first. A weight that is an embedding's too stays, because its rows are looked up.
    """
    embedded = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        # Subclasses may compute with their weight in other ways.
        if type(module) is not nn.Linear or module.weight.data_ptr() in embedded:
            continue
        if module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.weight.data = module.weight.data.t().contiguous().t()

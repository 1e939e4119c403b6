"""Tokens drawn at random, alike for equal lengths: the control of every other way."""

import torch


def random(keys: torch.Tensor, num_kept: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_kept)
    return torch.rand(keys.shape[:2], generator=generator).to(keys.device)

"""Draws: what they depend on, and what each parameter leaves to draw from."""

from collections import Counter

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from engine.compute.sampler import (
    LEAST_LOGPROB,
    penalized,
    sample,
    sample_rows,
    tell_probs,
    uniform,
)
from engine.schedule.runner import DrawnProbs, SampleParams

LOGITS = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SampleParams:
    return SampleParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=11)


def drawn(with_params: SampleParams, num_draws: int = 2000) -> Counter[int]:
    return Counter(sample(LOGITS, with_params, position) for position in range(num_draws))


def test_draws_follow_the_distribution() -> None:
    counts = drawn(params())
    for token, probability in enumerate((0.05, 0.5, 0.15, 0.3)):
        assert counts[token] / 2000 == pytest.approx(probability, abs=0.04)


def test_greedy_takes_the_most_likely() -> None:
    assert set(drawn(params(temperature=0), 5)) == {1}
    assert set(drawn(params(temperature=1e-30), 5)) == {1}
    assert set(drawn(params(top_k=1), 5)) == {1}


def test_top_k_and_top_p_leave_the_likely_ones() -> None:
    assert set(drawn(params(top_k=2))) == {1, 3}
    assert set(drawn(params(top_p=0.79))) == {1, 3}
    assert set(drawn(params(top_p=0.81))) == {1, 2, 3}
    assert set(drawn(params(top_p=0.0), 5)) == {1}
    assert set(drawn(params(top_k=99))) == {0, 1, 2, 3}


def test_only_what_is_allowed_is_drawn_and_the_rest_takes_no_place() -> None:
    allowed = bytes([0b0101])  # tokens 0 and 2
    for with_params, expected in (
        (params(), {0, 2}),
        (params(temperature=0), {2}),
        (params(top_k=1), {2}),
        (params(top_k=2), {0, 2}),
        (params(top_p=0.7), {2}),
        (params(top_p=0.8), {0, 2}),
    ):
        draws = {sample(LOGITS, with_params, position, allowed) for position in range(300)}
        assert draws == expected
    assert {sample(LOGITS, params(), position, bytes([0b1000])) for position in range(9)} == {3}
    assert sample(torch.zeros(50), params(top_p=0.01), 0) == 0, "of equal ones the first"
    assert LOGITS.isfinite().all(), "the logits of others are not touched"


def test_a_large_vocabulary_is_drawn_from_as_if_it_were_sorted_whole() -> None:
    """Peaked and flat logits, with the cut of top-p within the first sorted tokens and behind."""
    generator = torch.Generator().manual_seed(5)
    for spread in (8.0, 1.0, 0.01):
        logits = spread * torch.randn(9000, generator=generator)
        order = logits.argsort(descending=True)
        probabilities = torch.softmax(logits[order].double(), dim=-1)
        for top_p in (1.0, 0.999, 0.9, 0.3):
            before = probabilities.cumsum(0) - probabilities
            cumulative = probabilities[before < top_p].cumsum(0)
            for position in range(60):
                threshold = float(cumulative[-1]) * uniform(11, position)
                if (cumulative - threshold).abs().min() < 1e-9:
                    continue  # either neighbour is right
                expected = int(order[int((cumulative <= threshold).sum())])
                assert sample(logits, params(top_p=top_p), position) == expected


def test_rows_are_drawn_together_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(7)
    spreads = torch.tensor([8.0, 1.0, 0.01, 3.0])[:, None]
    for width, cases in ((9000, 80), (4099, 40), (140_000, 8)):
        logits = spreads.repeat(cases // 4, 1) * torch.randn(cases, width, generator=generator)
        logits[3, 5:] = float("-inf")
        logits[7] = 0.0
        row_params = [
            SampleParams(
                temperature=(0.3, 1.0, 2.0)[row % 3],
                top_p=(1.0, 0.9, 0.3, 0.0)[row % 4],
                top_k=(0, 0, 20, 50, width + 1)[row % 5],
                seed=row,
            )
            for row in range(cases)
        ]
        positions = list(range(100, 100 + cases))
        alone = [sample(logits[row], row_params[row], positions[row]) for row in range(cases)]
        assert sample_rows(logits, row_params, positions) == alone
        assert len(set(alone)) > cases // 2


def test_min_p_and_repetition_penalties_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = 3.0 * torch.randn(2, 500, generator=generator)
    for share in (0.0, 0.02, 0.3, 1.0):
        for heat in (0.5, 1.0, 2.0):
            allowed = MinPLogitsWarper(share)(torch.tensor([[]]), logits / heat).isfinite()
            params = SampleParams(temperature=heat, top_p=1.0, top_k=0, seed=4, min_p=share)
            for row in range(2):
                drawn = Counter(sample(logits[row], params, at) for at in range(400))
                assert all(allowed[row, token] for token in drawn)
                assert share < 1 or len(drawn) == 1
    token_ids = [3, 3, 17, 400]
    mask = bytearray(401)
    for token in token_ids:
        mask[token] = 1
    for penalty in (0.5, 1.3, 20.0):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([token_ids]), logits[:1])
        changed = penalized(logits, {0: (mask, penalty)})
        assert torch.equal(changed[:1], expected) and torch.equal(changed[1], logits[1])


def test_what_a_model_rules_out_has_a_finite_probability_and_no_more_are_told_than_there_are() -> (
    None
):
    probs = DrawnProbs(num_top=20)
    tell_probs(torch.tensor([0.0, float("-inf")]), 1, probs)
    assert (probs.drawn, len(probs.top)) == (LEAST_LOGPROB, 2)

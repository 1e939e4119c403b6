"""The synthetic engine's time model: how long a step that may be stopped goes on."""

import pytest

from engine.backends.synthetic import NUM_LAYERS, SyntheticRunner
from engine.schedule.runner import Work


@pytest.mark.parametrize("decode_seconds", [0.02, 0.2])
def test_a_stopped_step_ends_at_its_next_layer(decode_seconds: float) -> None:
    slept: list[float] = []
    runner = SyntheticRunner(
        prefill_seconds=0.0, decode_seconds=decode_seconds, copy_seconds=0.0, sleep=slept.append
    )
    works = [Work(token_ids=[1], start=0, block_table=[0])]
    assert runner.execute(works, lambda: len(slept) == 3) is None
    assert sum(slept) == pytest.approx(3 * decode_seconds / NUM_LAYERS)
    slept.clear()
    assert runner.execute(works, lambda: False) == [None]
    assert sum(slept) == pytest.approx(decode_seconds)

"""A call that was cut off keeps what there was of its input."""

import pytest

from gateway.dialects.anthropic.writer import _input


@pytest.mark.parametrize(
    ("written", "there"),
    [
        ("", {}),
        ('{"city": "Bern", "no', {"city": "Bern"}),
        ('{"city": "Be', {"city": "Be"}),
        ('{"days": [1, 2', {"days": [1, 2]}),
        ('{"city": "Bern"}', {"city": "Bern"}),
        ("{oops", {}),
    ],
)
def test_the_input_of_a_truncated_call_is_what_there_was(
    written: str, there: dict[str, object]
) -> None:
    assert _input(written) == there

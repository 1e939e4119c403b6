"""scripts/run: what it refuses, before it starts anything."""

from pathlib import Path

import pytest

from scripts.runner.options import misspelt_settings
from tests.scripts.runs import ended


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["--engine", "vllm"], "VLLM_PYTHON", id="no-vllm"),
        pytest.param(["--port", "65500"], "between 1 and 65114", id="no-port-for-the-dashboard"),
        pytest.param(["--sample", "--no-dashboard"], "--sample", id="nothing-to-look-at"),
        pytest.param(["--engine", "other"], "invalid choice", id="no-such-engine"),
        pytest.param(["--engines", "0"], "--engines", id="no-engines"),
        pytest.param(["--engine-arg", "blocks"], "K=V", id="no-value"),
        pytest.param(["--engine-arg", "port=1"], "scripts/run itself", id="its-own-setting"),
    ],
)
def test_an_option_that_cannot_be_served_exits_2(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = ended(*arguments, "--data", tmp_path / "data", VLLM_PYTHON="/no/such/python")
    assert done.returncode == 2 and said in done.stderr


def test_a_name_that_is_almost_a_setting_is_told() -> None:
    given = {"HOLDFAST_ENGINS": "x", "ENGINE_SECRT": "x", "HOLDFAST_API_KEY": "x", "HOME": "/"}
    assert misspelt_settings(given) == [
        "ENGINE_SECRT is no setting: did you mean ENGINE_SECRET?",
        "HOLDFAST_ENGINS is no setting: did you mean HOLDFAST_ENGINES?",
    ]

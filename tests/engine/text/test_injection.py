"""No text of a client becomes a control token, in any place, under any template.

`scripts/long_tests injections` draws 20,000 attacks; every commit some hundreds.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.protocol import Prompt
from engine.text.files import PromptFiles
from engine.text.renderer import ChatRenderer
from tests.engine.text.conversations import call_template_paths, template_paths
from tests.engine.text.injections import Injections, tokenizer_with_odd_controls
from tests.engine.text.template_runs import files_for
from tests.engine.text.vocabularies import KINDS

NUM_INJECTIONS = int(os.environ.get("INJECTIONS", "400"))
NUM_TEMPLATES_AT_A_COMMIT = 10
ALL = [*template_paths(), *call_template_paths()]


def renderer_of(path: Path, kind: str) -> ChatRenderer:
    template = path.read_text("utf-8")
    files = files_for(template)
    return ChatRenderer(
        PromptFiles(
            tokenizer=tokenizer_with_odd_controls(template, kind),
            templates=files.templates,
            special_tokens=files.special_tokens,
            end_token_ids=files.end_token_ids,
        )
    )


def controls_in(renderer: ChatRenderer, prompt: Prompt) -> list[int] | None:
    """The control tokens of a prompt in their order; None where it is refused."""
    controls = set(renderer._pieces.control_ids.values())
    try:
        rendered = renderer.render(prompt, thinking=True)
    except InvalidRequest:
        return None
    return [token_id for token_id in rendered.token_ids if token_id in controls]


def test_no_text_in_any_place_becomes_a_control_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = ALL if NUM_INJECTIONS > 2000 else ALL[:: len(ALL) // NUM_TEMPLATES_AT_A_COMMIT]
    counts: Counter[str] = Counter()
    for index, path in enumerate(paths):
        renderer = renderer_of(path, KINDS[index % len(KINDS)])
        has_tools = renderer.tool_format is not None
        drawn = Injections(index, list(renderer._pieces.control_ids), has_tools=has_tools)
        for _ in range(-(-NUM_INJECTIONS // len(paths))):
            attack = drawn.draw()
            found = controls_in(renderer, attack.attacked)
            expected = controls_in(renderer, attack.harmless)
            counts["attacks"] += 1
            counts["refused"] += found is None and expected is not None
            if found is not None and expected is not None:
                assert found == expected, (path.stem, attack.places, attack.payload)
    with capsys.disabled():
        print(
            f"\n{counts['attacks']} attacks on {len(paths)} templates: "
            f"no control token made, {counts['refused']} refused whose harmless twin is not"
        )
    assert counts["attacks"] >= NUM_INJECTIONS and counts["refused"] < counts["attacks"] / 4

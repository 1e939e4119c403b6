"""What models write where their templates render it in another way, or not at all."""

import pytest

from tests.engine.text.format_cases import renderer
from tests.engine.text.written_turns import read, request

INPUT = '{"city": "Bern", "count": 3}'
CALL = ("get_weather", {"city": "Bern", "count": 3})
OBJECT = f'{{"name": "get_weather", "arguments": {INPUT}}}'
PARAMETERS = OBJECT.replace("arguments", "parameters")
PYTHON = 'get_weather(city="Bern", count=3)'
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Bern</atem:parameter>\n'
    '<atem:parameter name="count">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather"><parameter name="city">Bern</parameter>\n'
    '<parameter name="count">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
CALLED = {
    "functionary-v3.2": [f"get_weather\n{INPUT}"],
    "gigachat-3": [f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}<|message_sep|>"],
    "glm-4-0414": [f"get_weather\n{INPUT}"],
    "hammer": [f"```\n[\n    {OBJECT}\n]\n```", f"```json\n[{OBJECT}]\n```", f"[{OBJECT}]"],
    "hunyuan": [f"<answer>\n<tool_calls>[{OBJECT}]</tool_calls>\n</answer>"],
    "internlm2": [
        f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>",
        f"<|action_start|><|plugin|>\n{OBJECT}<|action_end|>",
    ],
    "lfm2-told": [
        f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
        f"<|tool_call_start|>[{OBJECT}]<|tool_call_end|>",
    ],
    "llama-4-json": [
        PARAMETERS,
        f"<|python_start|>{PARAMETERS}<|python_end|>",
        f"<|python_start|>[{PYTHON}]<|python_end|>",
        f"[{PYTHON}]",
        f"<|python_start|><|python_end|>{PARAMETERS}",
    ],
    "minicpm3": [f"<|tool_call_start|>\n```python\n{PYTHON}\n```\n<|tool_call_end|>"],
    "minimax-m3-opened": [f"</mm:think>\n\n\n{MINIMAX}"],
    "muse": [f" to=get_weather<|message|>{ATEM}"],
    "phi-4-mini-bare": [f"<|tool_call|>[{OBJECT}]<|/tool_call|>", f"functools[{OBJECT}]", OBJECT],
    "smollm3": [f"<tool_call>\n{OBJECT}\n</tool_call>"],
    "xlam": [f"[{OBJECT}]", f"```json\n[{OBJECT}]\n```"],
}
SEVERAL = {
    "functionary-v3.2": [f"all\nI look.>>>get_weather\n{INPUT}>>>get_weather\n{INPUT}"],
    "glm-4-0414": [f"\nI look.<|assistant|>get_weather\n{INPUT}<|assistant|>get_weather\n{INPUT}"],
    "lfm2-told": [f"<|tool_call_start|>[{PYTHON}, {PYTHON}]<|tool_call_end|>I look."],
    "muse": [
        f" to=user<|message|>I look.<|eom|><|start|>assistant to=get_weather<|message|>{ATEM}"
        f"<|eom|><|start|>assistant to=get_weather<|message|>{ATEM}"
    ],
}
THOUGHT = {
    "hunyuan": "<think>\nHm.\n</think>\n<answer>\nIt is.\n</answer>",
    "lfm2-told": "It is.",
    "minicpm3": "<|thought_start|>\nHm.\n<|thought_end|>\nIt is.",
    "minimax-m3-opened": "Hm.\n</mm:think>\n\nIt is.",
    "muse": " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>It is.",
}
ANSWERED = {
    "functionary-v3.2": {"all\nIn Python >>> 1": "In Python >>> 1"},
    "glm-4-0414": {"\nIt is.": "It is.", "get_weather is one.": "get_weather is one."},
    "hammer": {"```\n[1]\n```": "```\n[1]\n```", "[1] is.": "[1] is."},
    "hunyuan": {"<answer>\nIt is.\n</answer>": "It is.", "An <answer>": "An <answer>"},
    "llama-4-json": {"[1] is.": "[1] is."},
    "muse": {" to=user<|message|>It is.": "It is."},
}


@pytest.mark.parametrize("name", CALLED)
def test_every_way_to_write_a_call_is_a_call(name: str) -> None:
    model = renderer(name)
    for text in CALLED[name]:
        for cuts in ((), range(len(text))):
            assert read(model, text, request(), cuts) == ([CALL], "", "")
    for text in SEVERAL.get(name, ()):
        for cuts in ((), range(len(text))):
            assert read(model, text, request(), cuts) == ([CALL, CALL], "", "I look.")


@pytest.mark.parametrize("name", [*ANSWERED, *THOUGHT])
def test_what_is_no_call_has_no_markup(name: str) -> None:
    model = renderer(name)
    for text, answer_text in ANSWERED.get(name, {}).items():
        for cuts in ((), range(len(text))):
            assert read(model, text, request(), cuts) == ([], "", answer_text)
    text = THOUGHT.get(name, "")
    for cuts in ((), range(len(text))):
        reading = read(model, text, request(thinking=True), cuts)
        assert reading == ([], "Hm." if "Hm." in text else "", "It is." if text else "")

"""DSPy's agent with one tool, or a typed answer: python dspy_run.py MODE URL KEY MODEL PROMPT.

MODE is a provider, or a provider and `json`: then there is no tool, and each of five questions with
the history before it asks for a JSON object of a schema.
"""

import sys
from typing import Any

import dspy
from dspy.lm15 import CacheConfig
from pydantic import BaseModel

mode, url, key, name, prompt = sys.argv[1:]
provider, _, kind = mode.partition("-")
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))
options: dict[str, Any] = {
    "api_base": f"{url}/v1",
    "api_key": key,
    "cache": False,
    "max_tokens": 500,
}
if provider == "anthropic":
    options["prompt_cache"] = CacheConfig(prefix="history")
model = dspy.LM(f"{provider}/{name}", **options)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())


class Found(BaseModel):
    text: str


class Answer(dspy.Signature):
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Typed(dspy.Signature):
    question: str = dspy.InputField()
    history: dspy.History = dspy.InputField()
    answer: Found = dspy.OutputField()


def look(where: str) -> str:
    """Look at a place."""
    return f"a cat, {where}"


if kind == "json":
    predict = dspy.Predict(Typed.with_instructions(handbook))
    turns: list[dict[str, object]] = []
    for step in range(5):
        question = f"{prompt} {step}"
        prediction = predict(question=question, history=dspy.History(messages=turns))
        turns.append({"question": question, "answer": prediction.answer})
    print(prediction.answer.text)
else:
    agent = dspy.ReActV2(Answer.with_instructions(handbook), tools=[look])
    print(agent(question=prompt).answer)

"""LiteLLM's completion in a loop with one tool: python litellm_run.py MODE URL KEY MODEL PROMPT."""

import json
import sys
from typing import Any

import litellm

mode, url, key, name, prompt = sys.argv[1:]
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))
marked = {"type": "text", "text": handbook, "cache_control": {"type": "ephemeral"}}
messages: list[Any] = [
    {"role": "system", "content": [marked]},
    {"role": "user", "content": prompt},
]
schema = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
about = {"name": "look", "description": "Look at a place.", "parameters": schema}
base = url if mode == "anthropic" else f"{url}/v1"
while True:
    answer = litellm.completion(
        model=f"{mode}/{name}",
        api_base=base,
        api_key=key,
        messages=messages,
        tools=[{"type": "function", "function": about}],
        cache_control_injection_points=[{"location": "message", "index": -1}],
    )
    message = answer.choices[0].message
    if not message.tool_calls:
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        where = json.loads(call.function.arguments)["where"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"a cat, {where}"})
print(message.content)

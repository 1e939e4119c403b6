"""OpenAI's Agents SDK with one tool: python openai_agents_run.py MODE URL KEY MODEL PROMPT."""

import sys

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

mode, url, key, name, prompt = sys.argv[1:]
set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=120))
set_default_openai_api("chat_completions" if mode == "openai-chat" else "responses")
set_tracing_disabled(True)
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))


@function_tool
def look(where: str) -> str:
    """Look at a place."""
    return f"a cat, {where}"


agent = Agent(name="Looker", instructions=handbook, model=name, tools=[look])
print(Runner.run_sync(agent, prompt).final_output)

"""LangChain's agent with one tool: python langchain_run.py MODE URL KEY MODEL PROMPT.

With MISHAPS it goes on after a run that ended early, and its middleware compacts the conversation.
"""

import base64
import os
import sys
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import SystemMessage
from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI

mode, url, key, name, prompt = sys.argv[1:]
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))
model: BaseChatModel
if mode == "anthropic":
    marker = {"cache_control": {"type": "ephemeral"}}
    model = ChatAnthropic(
        model=name, base_url=url, api_key=key, max_tokens=500, model_kwargs=marker
    )
else:
    is_responses = mode == "openai"
    base = f"{url}/v1"
    model = ChatOpenAI(model=name, base_url=base, api_key=key, use_responses_api=is_responses)


@tool
def look(where: str) -> str | list[dict[str, Any]]:
    """Look at a place."""
    if where == "nowhere":
        raise ToolException("there is no such place")
    if where == "picture":
        data = base64.b64encode(Path(os.environ["PICTURE"]).read_bytes()).decode()
        return [{"type": "image", "base64": data, "mime_type": "image/png"}]
    return f"a cat, {where}"


look.handle_tool_error = True
has_mishaps = bool(os.environ.get("MISHAPS"))
compacting = SummarizationMiddleware(model, trigger=("messages", 19), keep=("messages", 4))
agent = create_agent(
    model,
    [look],
    system_prompt=SystemMessage(handbook),
    middleware=[compacting] if has_mishaps else [],
)
messages: list[Any] = []
num_ended = 0
for _ in range(12 if has_mishaps else 1):
    messages = agent.invoke({"messages": [*messages, ("user", prompt)]})["messages"]
    print(messages[-1].text)
    num_ended += "All is done." in messages[-1].text
    if num_ended == 3:
        break

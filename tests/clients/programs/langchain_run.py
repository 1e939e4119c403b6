"""LangChain's agent with one tool: python langchain_run.py MODE URL KEY MODEL PROMPT."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

mode, url, key, name, prompt = sys.argv[1:]
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))
model: BaseChatModel
if mode == "anthropic":
    kept = {"cache_control": {"type": "ephemeral"}}
    model = ChatAnthropic(model=name, base_url=url, api_key=key, max_tokens=500, model_kwargs=kept)
else:
    model = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key=key)


@tool
def look(where: str) -> str:
    """Look at a place."""
    return f"a cat, {where}"


agent = create_agent(model, [look], system_prompt=SystemMessage(handbook))
print(agent.invoke({"messages": [("user", prompt)]})["messages"][-1].text)

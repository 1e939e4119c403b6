"""pydantic-ai's agent with one tool: python pydantic_ai_run.py MODE URL KEY MODEL PROMPT."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

mode, url, key, name, prompt = sys.argv[1:]
model: Model
if mode == "anthropic":
    settings = AnthropicModelSettings(anthropic_cache=True)
    provider = AnthropicProvider(api_key=key, base_url=url)
    model = AnthropicModel(name, provider=provider, settings=settings)
elif mode == "openai-chat":
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
else:
    model = OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))
agent = Agent(model, instructions=handbook)


@agent.tool_plain
def look(where: str) -> str:
    """Look at a place."""
    return f"a cat, {where}"


print(agent.run_sync(prompt).output)

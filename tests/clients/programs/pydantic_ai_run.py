"""pydantic-ai's agent with one tool: python pydantic_ai_run.py MODE URL KEY MODEL PROMPT.

With MISHAPS it goes on after a run that failed, and begins anew once (`/clear`).
"""

import os
import sys
from pathlib import Path

from pydantic_ai import Agent, BinaryContent, ModelRetry, capture_run_messages
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.messages import ModelMessage
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
agent = Agent(model, instructions=handbook, retries=5)


@agent.tool_plain
def look(where: str) -> str | BinaryContent:
    """Look at a place."""
    if where == "nowhere":
        raise ModelRetry("there is no such place")
    if where == "picture":
        return BinaryContent(Path(os.environ["PICTURE"]).read_bytes(), media_type="image/png")
    return f"a cat, {where}"


def carried_on(history: list[ModelMessage]) -> tuple[list[ModelMessage], bool]:
    """The conversation after a run, and whether that came to its end."""
    with capture_run_messages() as messages:
        try:
            result = agent.run_sync(prompt, message_history=history)
        except AgentRunError as error:
            print(f"{type(error).__name__}: {error}")
            return list(messages), False
    print(result.output)
    return result.all_messages(), True


history, _ = carried_on([])
num_ended = 0
for _ in range(12 if os.environ.get("MISHAPS") else 0):
    history, has_ended = carried_on(history)
    num_ended += has_ended
    if num_ended == 2:
        history = []
    if num_ended == 3:
        break

"""LlamaIndex's agent with one tool: python llamaindex_run.py MODE URL KEY MODEL PROMPT."""

import asyncio
import sys

from google.genai import types
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.google_genai import GoogleGenAI
from llama_index.llms.openai_like import OpenAILike

mode, url, key, name, prompt = sys.argv[1:]
llm: FunctionCallingLLM
if mode == "anthropic":
    marker = {"cache_control": {"type": "ephemeral"}}
    llm = Anthropic(
        name, base_url=url, api_key=key, max_tokens=500, additional_kwargs=marker, timeout=120
    )
elif mode == "openai-chat":
    tools = {"is_chat_model": True, "is_function_calling_model": True}
    llm = OpenAILike(name, api_base=f"{url}/v1", api_key=key, **tools)
else:
    options = types.HttpOptions(base_url=url)
    llm = GoogleGenAI(name, api_key=key, http_options=options, context_window=100_000)
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))


def look(where: str) -> str:
    """Look at a place."""
    return f"a cat, {where}"


async def main() -> None:
    agent = FunctionAgent(tools=[look], llm=llm, system_prompt=handbook)
    print(await agent.run(prompt))


asyncio.run(main())

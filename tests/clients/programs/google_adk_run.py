"""Google's ADK with one tool: python google_adk_run.py MODE URL KEY MODEL PROMPT."""

import asyncio
import os
import sys

from google.adk.agents import Agent
from google.adk.models.google_llm import Gemini
from google.adk.runners import InMemoryRunner
from google.genai import types

mode, url, key, name, prompt = sys.argv[1:]
os.environ["GOOGLE_API_KEY"] = key
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))


def look(where: str) -> str:
    """Look at a place."""
    return f"a cat, {where}"


async def main() -> None:
    model = Gemini(model=name, base_url=url)
    agent = Agent(name="looker", model=model, instruction=handbook, tools=[look])
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=prompt)])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
        if event.is_final_response() and event.content and event.content.parts:
            print(event.content.parts[0].text)


asyncio.run(main())

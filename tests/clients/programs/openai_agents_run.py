"""OpenAI's Agents SDK with one tool: python openai_agents_run.py MODE URL KEY MODEL PROMPT.

With MISHAPS it keeps a session, goes on after a run that failed, and has the session compacted
(Responses) or begins another (`/clear`, Chat Completions).
"""

import asyncio
import base64
import os
import sys
from pathlib import Path

from agents import (
    Agent,
    OpenAIResponsesCompactionSession,
    Runner,
    SQLiteSession,
    ToolOutputImage,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

mode, url, key, name, prompt = sys.argv[1:]
client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=120)
set_default_openai_client(client)
set_default_openai_api("chat_completions" if mode == "openai-chat" else "responses")
set_tracing_disabled(True)
handbook = " ".join(f"Rule {n}: the staff must file form {n * 7} before noon." for n in range(80))


@function_tool
def look(where: str) -> str | ToolOutputImage:
    """Look at a place."""
    if where == "nowhere":
        raise ValueError("there is no such place")
    if where == "picture":
        data = base64.b64encode(Path(os.environ["PICTURE"]).read_bytes()).decode()
        return ToolOutputImage(image_url=f"data:image/png;base64,{data}")
    return f"a cat, {where}"


async def with_mishaps() -> None:
    session = SQLiteSession("first")
    num_ended = 0
    for _ in range(12):
        try:
            result = await Runner.run(agent, prompt, session=session)
        except AgentsException as error:
            print(f"{type(error).__name__}: {error}")
            continue
        print(result.final_output)
        num_ended += result.final_output == "All is done."
        if num_ended == 2 and mode == "openai-chat":
            session = SQLiteSession("second")
        elif num_ended == 2:
            compacting = OpenAIResponsesCompactionSession(
                "first",
                session,
                client=client,
                compaction_mode="input",
            )
            compacting.model = name  # it takes OpenAI's names alone
            await compacting.run_compaction({"force": True})
        if num_ended == 3:
            break


agent = Agent(name="Looker", instructions=handbook, model=name, tools=[look])
if os.environ.get("MISHAPS"):
    asyncio.run(with_mishaps())
else:
    print(Runner.run_sync(agent, prompt).final_output)

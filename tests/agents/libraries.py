"""Recipes of libraries: a short program each, with one tool, in `tests/clients/programs`."""

import json
from dataclasses import replace

from tests.agents.recipes import LAST_TEXT, MODEL, Recipe, call

GIVEN = {"where": "room $step"}
ARGUMENTS = ("$url", "$key", MODEL, "$prompt")


def python_program(name: str, package: str, place: str, program: str, mode: str) -> Recipe:
    return Recipe(
        name=f"{name}, {mode}",
        package=package,
        place=place,
        command=(f"$agents/{place}/bin/python", f"$programs/{program}", mode, *ARGUMENTS),
        tool="look",
        given=GIVEN,
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "true"},
    )


def node_program(
    name: str,
    package: str,
    program: str,
    mode: str,
    *,
    place: str = "sdk",
    is_streamed: bool = False,
) -> Recipe:
    return Recipe(
        name=f"{name}, {mode}{', streamed' if is_streamed else ''}",
        package=package,
        place=place,
        command=("node", f"$programs/{program}", mode, *ARGUMENTS),
        tool="look",
        given=GIVEN,
        environment={
            "SDK_FOLDER": f"$agents/{place}",
            "STREAMED": str(int(is_streamed)),
            "AI_SDK_LOG_WARNINGS": "false",
        },
    )


AGENT_SDK = Recipe(
    name="Claude Agent SDK",
    package="@anthropic-ai/claude-agent-sdk",
    place="pi",
    command=("node", "$programs/agent_sdk.mjs", "$prompt"),
    tool="Bash",
    given={"command": "echo step $step", "description": "a step"},
    environment={
        "SDK_FOLDER": "$agents/pi",
        "ANTHROPIC_BASE_URL": "$url",
        "ANTHROPIC_API_KEY": "$key",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    may_miss=frozenset({"/api/hello"}),
)

CLAUDE_ID = "claude-sonnet-4-5"


def asking_for(model: str, made: Recipe) -> Recipe:
    """The recipe with another model, for a client that knows the models in its own list alone."""
    return replace(made, command=tuple(model if part == MODEL else part for part in made.command))


def dspy(mode: str, model: str, tool: str, last: str) -> Recipe:
    """DSPy asks for tools and schemas of models in its own list alone: Anthropic's ids are."""
    made = python_program("DSPy", "dspy", "litellm", "dspy_run.py", mode)
    return replace(asking_for(model, made), tool=tool, last=last)


def llamaindex(mode: str) -> Recipe:
    made = python_program("LlamaIndex", "llama-index-core", "llamaindex", "llamaindex_run.py", mode)
    return asking_for(CLAUDE_ID, made) if mode == "anthropic" else made


DSPY = (
    dspy("anthropic", CLAUDE_ID, "look", call("submit", {"answer": LAST_TEXT})),
    dspy("anthropic-json", CLAUDE_ID, "", json.dumps({"answer": {"text": LAST_TEXT}})),
    dspy("openai-json", MODEL, "", json.dumps({"answer": {"text": LAST_TEXT}})),
)

LIBRARIES: tuple[Recipe, ...] = (
    AGENT_SDK,
    *(
        node_program("OpenAI Agents (JS)", "@openai/agents", "openai_agents.mjs", mode)
        for mode in ("openai", "openai-chat")
    ),
    *(
        python_program(
            "OpenAI Agents (Python)", "openai-agents", "agents", "openai_agents_run.py", mode
        )
        for mode in ("openai", "openai-chat")
    ),
    *(
        node_program(
            "Google Gen AI (JS)",
            "@google/genai",
            "google_genai.mjs",
            "gemini",
            place="google",
            is_streamed=is_streamed,
        )
        for is_streamed in (False, True)
    ),
    python_program("Google ADK", "google-adk", "adk", "google_adk_run.py", "gemini"),
    node_program("Mastra", "@mastra/core", "mastra.mjs", "openai-chat", place="mastra"),
    *(llamaindex(mode) for mode in ("anthropic", "openai-chat", "gemini")),
    *(
        node_program("Genkit", "genkit", "genkit.mjs", mode, place="genkit", is_streamed=True)
        for mode in ("gemini", "openai-chat")
    ),
    *(
        python_program("pydantic-ai", "pydantic-ai-slim", "python", "pydantic_ai_run.py", mode)
        for mode in ("anthropic", "openai-chat", "openai")
    ),
    *(
        python_program("LangChain (Python)", "langchain", "python", "langchain_run.py", mode)
        for mode in ("anthropic", "openai-chat")
    ),
    *(
        node_program("LangChain (JS)", "langchain", "langchain_js.mjs", mode, place="langchain")
        for mode in ("anthropic", "openai-chat", "openai")
    ),
    *DSPY,
    *(
        python_program("LiteLLM", "litellm", "litellm", "litellm_run.py", mode)
        for mode in ("anthropic", "openai")
    ),
    *(
        node_program("AI SDK", "ai", "ai_sdk.mjs", mode, is_streamed=is_streamed)
        for mode in ("anthropic", "openai-chat", "openai")
        for is_streamed in (False, True)
    ),
)

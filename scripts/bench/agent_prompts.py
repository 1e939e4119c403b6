"""What a coding agent's requests are made of, for `agent.py`: shapes are real, words are made up.

Shapes as in public captures: github.com/anthropics/claude-code issues 24168 and 68900 (the billing
line), ex-machina-co/opencode-anthropic-auth issue 174 (the betas of version 2.1.185).
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from anthropic import Anthropic

MAIN, EXPLORER = "main", "explorer"
VERSION = "2.1.185"
SESSION = "5e551011-0000-4000-8000-0000000008b3"
BETAS = [
    "claude-code-20250219",
    "interleaved-thinking-2025-05-14",
    "thinking-token-count-2026-05-13",
    "context-management-2025-06-27",
    "prompt-caching-scope-2026-01-05",
    "mid-conversation-system-2026-04-07",
    "advisor-tool-2026-03-01",
    "effort-2025-11-24",
    "extended-cache-ttl-2025-04-11",
]
HEADERS = {
    "user-agent": f"claude-cli/{VERSION} (external, cli)",
    "x-app": "cli",
    "x-claude-code-session-id": SESSION,
}
TOOL_NAMES = (
    "Task Bash Glob Grep Read Edit Write NotebookEdit WebFetch WebSearch TodoWrite TaskOutput "
    "KillShell Skill AskUserQuestion EnterPlanMode ExitPlanMode"
).split()
WORDS = (
    "agent branch build call change check commit command default describe directory edit error "
    "example file find function import input line list module name never option output path plan "
    "process prompt read result return run script search step string task test tool update user "
    "value version wait write"
).split()
# Of the size that is asked for: the tools, the main system prompt (an explorer's is a third of it).
TOOLS_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Prompts:
    """`size` is what tools and main system prompt take, in tokens by the API's own count."""

    identity: str
    tools: list[Any]
    system: dict[str, str]
    bytes_per_token: float
    size: int

    @staticmethod
    def sized(client: Anthropic, model: str, tokens: int) -> "Prompts":
        """Of about so many tokens, as the model's tokenizer cuts these words."""
        text = _prose(40_000, "ratio")
        ratio = len(text) / (_count(client, model, system=text) - _count(client, model))
        each = int(tokens * TOOLS_SHARE * ratio / len(TOOL_NAMES))
        tools = [_tool(name, each) for name in TOOL_NAMES]
        room = int(tokens * (1 - TOOLS_SHARE) * ratio)
        system = {MAIN: _prose(room, MAIN), EXPLORER: _prose(room // 3, EXPLORER)}
        size = _count(client, model, system=system[MAIN], tools=tools) - _count(client, model)
        return Prompts(
            "You are a coding agent that works in a terminal.", tools, system, ratio, size
        )

    def prose(self, tokens: int, seed: str) -> str:
        return _prose(int(tokens * self.bytes_per_token), seed)


def billing_line(rng: random.Random, *, is_subagent: bool) -> str:
    """The version's suffix and `cch` are others in every request."""
    suffix, cch = f"{rng.getrandbits(12):03x}", f"{rng.getrandbits(20):05x}"
    subagent = " cc_is_subagent=true;" if is_subagent else ""
    line = f"x-anthropic-billing-header: cc_version={VERSION}.{suffix}; cc_entrypoint=cli;"
    return f"{line}{subagent} cch={cch};"


def marked(text: str) -> Any:
    return with_marker({"type": "text", "text": text})


def with_marker(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "cache_control": {"type": "ephemeral"}}


def metadata() -> Any:
    user = {"device_id": "0" * 64, "account_uuid": "", "session_id": SESSION}
    return {"user_id": json.dumps(user)}


def _tool(name: str, size: int) -> dict[str, Any]:
    properties = {
        key: {"type": "string", "description": _prose(size // 10, name + key)}
        for key in ("path", "pattern", "reason")
    }
    frame = {
        "name": name,
        "description": "",
        "input_schema": {
            "type": "object",
            "properties": properties,
            "required": ["path"],
            "additionalProperties": False,
        },
    }
    return {**frame, "description": _prose(max(size - len(json.dumps(frame)), 1), name)}


def _prose(size: int, seed: str) -> str:
    """Words in so many bytes, the same for the same seed."""
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=max(size // 4, 1)))[:size]


def _count(client: Anthropic, model: str, **body: Any) -> int:
    question: Any = [{"role": "user", "content": "?"}]
    return client.messages.count_tokens(model=model, messages=question, **body).input_tokens

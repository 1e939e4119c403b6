"""Install agents from npm and PyPI, run them against a scripted engine, and print their table.

    python -m scripts.setup.agent_tests [--table] [pytest arguments]

AGENTS_FOLDER says where they are installed, `.agents` by default. Each of GROUPS has a folder of
its own there, because npm resolves what stands in one folder together. Some clients want a newer
Node than a machine has, so Node comes from npm too. `--table` leaves the tests out.
"""

import os
import subprocess
import sys
from pathlib import Path

from scripts.stack import ROOT, python

NODE = "node@22"
GROUPS: dict[str, tuple[str, ...]] = {
    ".": (
        "@anthropic-ai/claude-code",
        "@github/copilot",
        "@google/gemini-cli",
        "@openai/codex",
        "@qwen-code/qwen-code",
        "opencode-ai",
    ),
    "sdk": ("@ai-sdk/anthropic", "@ai-sdk/openai", "@openai/agents", "ai", "openai", "zod"),
    "pi": (
        "@anthropic-ai/claude-agent-sdk",
        "@continuedev/cli",
        "@mariozechner/pi-coding-agent",
    ),
    "cline": ("cline",),
    "kilo": ("@kilocode/cli@7.7.7",),  # the newest one of which npm has the programs for Linux
    "google": ("@google/genai",),
    "mastra": ("@mastra/core", "zod"),
    "genkit": ("@genkit-ai/compat-oai", "@genkit-ai/google-genai", "genkit"),
    # The newest one that can be installed: 3 needs a package that npm does not have.
    "router": ("@musistudio/claude-code-router@2",),
    "langchain": (
        "@langchain/anthropic",
        "@langchain/core",
        "@langchain/openai",
        "langchain",
        "zod",
    ),
}
PYTHON_GROUPS: dict[str, tuple[str, ...]] = {
    "aider": ("aider-chat",),
    "python": (
        "langchain",
        "langchain-anthropic",
        "langchain-openai",
        "pydantic-ai-slim[anthropic,openai]",
    ),
    "litellm": ("dspy", "litellm", "mcp"),
    # Each has versions of the SDKs of its own.
    "agents": ("openai-agents",),
    "adk": ("google-adk",),
    # LlamaIndex' package for Anthropic sends a `temperature`, which SDKs from 1 on do not take.
    "llamaindex": (
        "anthropic<1",
        "llama-index-core",
        "llama-index-llms-anthropic",
        "llama-index-llms-google-genai",
        "llama-index-llms-openai-like",
    ),
}


def install(folder: Path) -> None:
    """Install all groups. A group that fails is told; its clients count as not installed."""
    npm = ["npm", "install", "--no-fund", "--no-audit"]
    for group in GROUPS:
        manifest = folder / group / "package.json"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        if not manifest.exists():  # else npm installs into a folder above
            manifest.write_text('{"private": true}')
    subprocess.run([*npm, NODE], cwd=folder, check=True)
    # npm takes releases that go with the Node which runs it.
    path = f"{folder}/node_modules/.bin:{os.environ['PATH']}"
    for group, packages in GROUPS.items():
        room = folder / group
        latest = [name if "@" in name[1:] else f"{name}@latest" for name in packages]
        done = subprocess.run([*npm, *latest], cwd=room, env={**os.environ, "PATH": path})
        told(group, done.returncode)
    for group, packages in PYTHON_GROUPS.items():
        interpreter = folder / group / "bin" / "python"
        if not interpreter.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / group], check=True)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--upgrade"]
        told(group, subprocess.run([*pip, *packages]).returncode)


def told(group: str, status: int) -> None:
    if status != 0:
        print(f"{group}: not installed (status {status})", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    folder = Path(os.environ.get("AGENTS_FOLDER", ROOT / ".agents")).resolve()
    install(folder)
    environment = {**os.environ, "AGENTS_FOLDER": str(folder)}
    status = subprocess.run([*python("tests.agents")], cwd=ROOT, env=environment).returncode
    if "--table" in arguments:
        return status
    tests = [*python("pytest"), "--timeout", "0", "-rP", "tests/e2e/test_agents.py", *arguments]
    return status | subprocess.run(tests, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

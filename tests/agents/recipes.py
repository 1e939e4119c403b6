"""Recipes: how each client is installed, pointed at a gateway, and started.

In every text of a recipe `$url` is the gateway, `$key` its key, `$port` a free port, `$home` and
`$work` empty folders of this run, `$agents` the folder of the installed clients, `$programs` that
of our short programs, and `$prompt` what the user says. No client is changed: variables, its
configuration and its command line are all that a recipe sets.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LAST_TEXT = "All is done."
MODEL = "scripted"
SHELL = {"command": "echo step $step", "description": "a step"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One client in one mode.

    `tool` is the tool of the client that the script calls with `given`, in which `$step` is the
    turn; a client without tools has an empty name there and gets `typed`, a prompt each line.
    `last` is what the engine writes when a run ends. `before` is a command that sets the client up,
    `resumed` are later runs that carry the conversation on, and `after` is a command that ends what
    the client left running. `package` is read for the version, in `place` under the folder of the
    clients: a folder with `node_modules`, or a virtual environment.
    `may_miss` are paths outside of the API that the client asks for and does well without. Less
    than the share `least_read` of turns 2 to n is a failure.
    """

    name: str
    package: str
    command: tuple[str, ...]
    tool: str
    given: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    place: str = "."
    before: tuple[str, ...] = ()
    resumed: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()
    last: str = LAST_TEXT
    typed: str = ""
    may_miss: frozenset[str] = frozenset()
    least_read: float = 0.0
    sees: bool = False

    def version(self, folder: Path) -> str | None:
        """The installed version, or None where it is not installed."""
        room = folder / self.place
        manifest = room / "node_modules" / self.package / "package.json"
        if manifest.exists():
            return str(json.loads(manifest.read_text())["version"])
        interpreter = room / "bin" / "python"
        if not interpreter.exists():
            return None
        asked = f"from importlib.metadata import version; print(version({self.package!r}))"
        done = subprocess.run([interpreter, "-c", asked], capture_output=True, text=True)
        return done.stdout.strip() or None


def call(name: str, given: Mapping[str, Any]) -> str:
    """A call exactly as the demo model's template has it: strict tools hold the engine to that."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"


CLAUDE = ("claude", "--dangerously-skip-permissions", "-p", "$prompt")
CLAUDE_CODE = Recipe(
    name="Claude Code",
    package="@anthropic-ai/claude-code",
    command=CLAUDE,
    tool="Bash",
    given=SHELL,
    environment={
        "ANTHROPIC_BASE_URL": "$url",
        "ANTHROPIC_API_KEY": "$key",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    may_miss=frozenset({"/api/hello"}),
)
CLAUDE_CONTINUE = replace(
    CLAUDE_CODE, name="Claude Code, --continue", resumed=((*CLAUDE, "--continue"),)
)
SESSION = "5f0c9b2e-6f43-4c0e-9d5e-3a5f1f6a7c11"
CLAUDE_RESUME = replace(
    CLAUDE_CODE,
    name="Claude Code, --resume",
    command=(*CLAUDE, "--session-id", SESSION),
    resumed=((*CLAUDE, "--resume", SESSION),),
)

CLAUDE_BARE = replace(
    CLAUDE_CODE, name="Claude Code, --bare", command=("claude", "--bare", *CLAUDE[1:])
)

CLAUDE_CODE_ROUTER = Recipe(
    name="claude-code-router",
    package="@musistudio/claude-code-router",
    place="router",
    command=("ccr", "code", *CLAUDE[1:]),
    after=("ccr", "stop"),
    tool="Bash",
    given=SHELL,
    environment={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    files={
        "$home/.claude-code-router/config.json": json.dumps(
            {
                "PORT": "$port",
                "NON_INTERACTIVE_MODE": True,
                "Providers": [
                    {
                        "name": "holdfast",
                        "api_base_url": "$url/v1/chat/completions",
                        "api_key": "$key",
                        "models": [MODEL],
                        "transformer": {"use": ["openrouter"]},
                    }
                ],
                "Router": {"default": f"holdfast,{MODEL}"},
            }
        )
    },
)

CODEX = Recipe(
    name="Codex",
    package="@openai/codex",
    command=(
        "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "$prompt",
    ),
    tool="exec_command",
    given={"cmd": "echo step $step"},
    least_read=0.95,
    environment={"CODEX_HOME": "$home/.codex", "HOLDFAST_KEY": "$key"},
    files={
        "$home/.codex/config.toml": (
            f'model = "{MODEL}"\nmodel_provider = "holdfast"\n'
            '[model_providers.holdfast]\nname = "Holdfast"\nenv_key = "HOLDFAST_KEY"\n'
            'wire_api = "responses"\nbase_url = "$url/v1"\n'
        )
    },
)

GEMINI_CLI = Recipe(
    name="Gemini CLI",
    package="@google/gemini-cli",
    command=("gemini", "-m", MODEL, "--yolo", "--skip-trust", "-p", "$prompt"),
    tool="run_shell_command",
    given=SHELL,
    least_read=0.95,
    environment={"GEMINI_API_KEY": "$key", "GOOGLE_GEMINI_BASE_URL": "$url"},
    files={
        "$home/.gemini/settings.json": json.dumps(
            {"security": {"auth": {"selectedType": "gemini-api-key"}}}
        )
    },
)


def qwen(dialect: str, base: str) -> Recipe:
    names = ("BASE_URL", "API_KEY", "MODEL")
    values = zip(names, (base, "$key", MODEL), strict=True)
    return Recipe(
        name=f"Qwen Code, {dialect}",
        package="@qwen-code/qwen-code",
        command=("qwen", "--auth-type", dialect, "-m", MODEL, "--yolo", "-p", "$prompt"),
        tool="run_shell_command",
        given={**SHELL, "is_background": "false"},
        environment={f"{dialect.upper()}_{name}": value for name, value in values},
    )


def copilot(mode: str, base: str, **options: str) -> Recipe:
    """GitHub's Copilot CLI with a provider of one's own, and without a login."""
    named = {f"COPILOT_PROVIDER_{name.upper()}": value for name, value in options.items()}
    return Recipe(
        name=f"Copilot CLI, {mode}",
        package="@github/copilot",
        command=("copilot", "--allow-all-tools", "--no-color", "-p", "$prompt"),
        tool="bash",
        given=SHELL,
        environment={
            "COPILOT_MODEL": MODEL,
            "COPILOT_OFFLINE": "true",
            "COPILOT_PROVIDER_API_KEY": "$key",
            "COPILOT_PROVIDER_BASE_URL": base,
            **named,
        },
    )


COPILOT = copilot("openai-chat", "$url/v1")
COPILOT_CONTINUE = replace(
    COPILOT, name="Copilot CLI, --continue", resumed=((*COPILOT.command, "--continue"),)
)


def opencode(provider: str, module: str, base: str, *, sees: bool = False) -> Recipe:
    """opencode with a provider of the AI SDK, which shows pictures to a model that `sees`."""
    model: dict[str, Any] = {"name": MODEL, "limit": {"context": 200_000, "output": 4096}}
    if sees:
        model |= {
            "attachment": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
        }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "holdfast": {
                "npm": module,
                "name": "Holdfast",
                "options": {"baseURL": base, "apiKey": "$key"},
                "models": {MODEL: model},
            }
        },
    }
    return Recipe(
        name=f"opencode, {provider}",
        package="opencode-ai",
        command=("opencode", "run", "-m", f"holdfast/{MODEL}", "$prompt"),
        tool="bash",
        given=SHELL,
        environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        files={"$home/.config/opencode/opencode.json": json.dumps(settings)},
    )


def kilo(made: Recipe) -> Recipe:
    """Kilo Code's CLI has opencode's settings under its own name."""
    [settings] = made.files.values()
    return replace(
        made,
        name=made.name.replace("opencode", "Kilo CLI"),
        package="@kilocode/cli",
        place="kilo",
        command=("kilo", "run", "--auto", *made.command[2:]),
        environment={"KILO_DISABLE_MODELS_FETCH": "1", "KILO_DISABLE_AUTOUPDATE": "1"},
        files={"$home/.config/kilo/kilo.json": settings},
    )


def pi(dialect: str, api: str, base: str) -> Recipe:
    provider = {"baseUrl": base, "api": api, "apiKey": "$key", "models": [{"id": MODEL}]}
    return Recipe(
        name=f"pi, {dialect}",
        package="@mariozechner/pi-coding-agent",
        place="pi",
        command=("pi", "--provider", "holdfast", "--model", MODEL, "-p", "$prompt"),
        tool="bash",
        given={"command": "echo step $step"},
        environment={"PI_OFFLINE": "1"},
        files={"$home/.pi/agent/models.json": json.dumps({"providers": {"holdfast": provider}})},
    )


def continue_cn(provider: str, base: str) -> Recipe:
    return Recipe(
        name=f"Continue cn, {provider}",
        package="@continuedev/cli",
        place="pi",
        command=("cn", "--config", "$home/config.yaml", "--auto", "-p", "$prompt"),
        tool="Bash",
        given={"command": "echo step $step"},
        environment={"CONTINUE_TELEMETRY_ENABLED": "0"},
        files={
            "$home/config.yaml": (
                "name: holdfast\nversion: 1.0.0\nschema: v1\nmodels:\n"
                f"  - name: {MODEL}\n    provider: {provider}\n    model: {MODEL}\n"
                f"    apiBase: {base}\n    apiKey: $key\n    roles: [chat]\n"
                "    capabilities: [tool_use]\n"
            )
        },
    )


CLINE = Recipe(
    name="Cline CLI",
    package="cline",
    place="cline",
    before=("cline", "auth", "-p", "openai", "-k", "$key", "-m", MODEL, "-b", "$url/v1"),
    command=("cline", "-P", "openai", "-m", MODEL, "$prompt"),
    tool="run_commands",
    given={"commands": ["echo step $step"]},
    environment={"CLINE_TELEMETRY_DISABLED": "1"},
)


def aider(dialect: str, options: tuple[str, ...], environment: Mapping[str, str]) -> Recipe:
    return Recipe(
        name=f"aider, {dialect}",
        package="aider-chat",
        place="aider",
        command=(
            "$agents/aider/bin/aider",
            *("--model", f"{dialect}/{MODEL}", "--yes-always", "--no-git", "--no-pretty"),
            *("--no-check-update", "--no-show-model-warnings", "--analytics-disable"),
            *("--read", "$work/rules.md"),
            *options,
        ),
        tool="",
        given={},
        files={
            "$work/rules.md": "\n".join(f"Rule {n}: form {n * 7} is due." for n in range(200)),
            "$work/settings.yml": f"- name: anthropic/{MODEL}\n  cache_control: true\n",
        },
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "true", **environment},
        typed="$prompt\n" * 5,
    )


def kimi(kind: str, base: str) -> Recipe:
    named = {"NAME": MODEL, "PROVIDER_TYPE": kind, "BASE_URL": base, "API_KEY": "$key"}
    named["MAX_CONTEXT_SIZE"] = "200000"
    return Recipe(
        name=f"Kimi Code, {kind}",
        package="@moonshot-ai/kimi-code",
        place="kimi",
        command=("kimi", "-p", "$prompt"),
        tool="Bash",
        given=SHELL,
        environment={f"KIMI_MODEL_{name}": value for name, value in named.items()},
    )


ECHO = {"command": "echo step $step"}
NANOCODER = Recipe(
    name="nanocoder",
    package="@nanocollective/nanocoder",
    place="nanocoder",
    command=("nanocoder", "--trust-directory", "--mode", "yolo", "--plain", "run", "$prompt"),
    tool="execute_bash",
    given=ECHO,
    files={
        "$work/agents.config.json": (
            '{"nanocoder": {"providers": [{"name": "holdfast", "baseUrl": "$url/v1",'
            f' "apiKey": "$key", "models": ["{MODEL}"]}}]}}}}'
        )
    },
)
GROK = Recipe(
    name="Grok CLI",
    package="@vibe-kit/grok-cli",
    place="grok",
    command=("grok", "-m", MODEL, "-p", "$prompt"),
    tool="bash",
    given=ECHO,
    environment={"GROK_API_KEY": "$key", "GROK_BASE_URL": "$url/v1"},
)
VIBE = Recipe(
    name="mistral-vibe",
    package="mistral-vibe",
    place="vibe",
    command=("$agents/vibe/bin/vibe", "-p", "$prompt", "--trust", "--auto-approve"),
    tool="bash",
    given=ECHO,
    environment={"HOLDFAST_KEY": "$key", "VIBE_HOME": "$home/.vibe"},
    files={
        "$home/.vibe/config.toml": (
            f'active_model = "{MODEL}"\nenable_telemetry = false\nenable_update_checks = false\n'
            '[[providers]]\nname = "holdfast"\napi_base = "$url/v1"\nbackend = "generic"\n'
            'api_key_env_var = "HOLDFAST_KEY"\napi_style = "openai"\n'
            f'[[models]]\nname = "{MODEL}"\nprovider = "holdfast"\nalias = "{MODEL}"\n'
        )
    },
)
DROID = Recipe(
    name="droid",
    package="@factory/cli",
    place="droid",
    command=("droid", "exec", "--skip-permissions-unsafe", "-m", f"custom:{MODEL}", "$prompt"),
    tool="Execute",
    given={**ECHO, "timeout": 60, "riskLevelReason": "none", "riskLevel": "low"},
    environment={"FACTORY_API_KEY": "fk-none"},
    files={
        "$home/.factory/settings.json": (
            f'{{"customModels": [{{"model": "{MODEL}", "displayName": "{MODEL}", "baseUrl": '
            '"$url/v1", "apiKey": "$key", "provider": "generic-chat-completion-api"}]}'
        )
    },
)
GPTME = Recipe(
    name="gptme",
    package="gptme",
    place="gptme",
    command=(
        *("$agents/gptme/bin/gptme", "--non-interactive", "--tool-format", "tool"),
        *("-m", f"local/{MODEL}", "$prompt"),
    ),
    tool="shell",
    given=ECHO,
    environment={"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key"},
)

LOOK = {"file_path": "$work/picture.png"}
EYES = tuple(
    replace(recipe, name=f"{recipe.name}, a picture", sees=True, least_read=0.9)
    for recipe in (
        replace(CLAUDE_CODE, tool="Read", given=LOOK),
        replace(CODEX, command=(*CODEX.command[:-1], "-i", "$work/picture.png", "--", "$prompt")),
        replace(GEMINI_CLI, command=(*GEMINI_CLI.command[:-1], "@picture.png $prompt")),
        replace(
            opencode("anthropic", "@ai-sdk/anthropic", "$url/v1", sees=True),
            command=("opencode", "run", "-m", f"holdfast/{MODEL}", "$prompt", "-f", "picture.png"),
        ),
    )
)

AGENTS: tuple[Recipe, ...] = (
    CLAUDE_CODE,
    CLAUDE_CONTINUE,
    CLAUDE_RESUME,
    CLAUDE_BARE,
    CLAUDE_CODE_ROUTER,
    CODEX,
    GEMINI_CLI,
    qwen("openai", "$url/v1"),
    qwen("anthropic", "$url"),
    COPILOT,
    COPILOT_CONTINUE,
    copilot("openai", "$url/v1", wire_api="responses"),
    copilot("anthropic", "$url", type="anthropic"),
    opencode("anthropic", "@ai-sdk/anthropic", "$url/v1"),
    opencode("openai-compatible", "@ai-sdk/openai-compatible", "$url/v1"),
    opencode("openai", "@ai-sdk/openai", "$url/v1"),
    kilo(opencode("anthropic", "@ai-sdk/anthropic", "$url/v1")),
    kilo(opencode("openai-compatible", "@ai-sdk/openai-compatible", "$url/v1")),
    pi("anthropic", "anthropic-messages", "$url"),
    pi("openai", "openai-completions", "$url/v1"),
    CLINE,
    continue_cn("openai", "$url/v1"),
    continue_cn("anthropic", "$url/v1/"),
    *(kimi(kind, "$url/v1") for kind in ("kimi", "openai", "openai_responses")),
    kimi("anthropic", "$url"),
    NANOCODER,
    GROK,
    VIBE,
    DROID,
    GPTME,
    aider("openai", (), {"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "$key"}),
    aider(
        "anthropic",
        ("--cache-prompts", "--model-settings-file", "$work/settings.yml"),
        {"ANTHROPIC_API_BASE": "$url", "ANTHROPIC_API_KEY": "$key"},
    ),
    *EYES,
)

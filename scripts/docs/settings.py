"""Write the settings to `.env.example`, and as a table beside each `settings.py`.

Run it after a change of settings; tests/test_layout.py fails when it was forgotten.
"""

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from dashboard.settings import Settings as DashboardSettings
from engine.settings import Settings as EngineSettings
from gateway.base.settings import Settings as GatewaySettings
from scripts.stack import ROOT

PROGRAMS: list[tuple[str, type[BaseSettings]]] = [
    ("gateway", GatewaySettings),
    ("engine", EngineSettings),
    ("dashboard", DashboardSettings),
]
PAGES = {
    "gateway": "gateway/base/SETTINGS.md",
    "engine": "engine/SETTINGS.md",
    "dashboard": "dashboard/SETTINGS.md",
}
# Defaults that depend on where the program is installed.
PLACED = {"ENGINE_MODEL": "engine/demo_model"}
COMPOSE = """# Settings for docker compose, and all others with their defaults.
# scripts/compose_env makes .env of this, with secrets.
# scripts/run needs none of this: it makes its secrets and keeps them in its data directory.

# docker compose: default, gpu, attach or scale
COMPOSE_PROFILES=default

# Required by docker compose; POSTGRES_PASSWORD in letters and digits only
HOLDFAST_API_KEY=
HOLDFAST_ADMIN_KEY=
HOLDFAST_ENGINE_SECRET=
HOLDFAST_MASTER_SECRET=
POSTGRES_PASSWORD=

# docker compose: ports on 127.0.0.1
#PUBLISHED_GATEWAY_PORT=8080
#PUBLISHED_DASHBOARD_PORT=8501
#PUBLISHED_PROMETHEUS_PORT=9090
# docker compose: what the engine may take (profile gpu: 48g, 8)
#COMPOSE_ENGINE_MEMORY=4g
#COMPOSE_ENGINE_CPUS=2
# docker compose, profile gpu: number of GPUs, and more flags of `vllm serve`
#COMPOSE_ENGINE_GPUS=1
#COMPOSE_VLLM_FLAGS=--max-model-len 32768
# docker compose: other people's images; a release names each by its digest, as in name@sha256:...
#COMPOSE_PYTHON_IMAGE=python:3.11.14-slim-bookworm
#COMPOSE_POSTGRES_IMAGE=postgres:17.6-bookworm
#COMPOSE_PROMETHEUS_IMAGE=prom/prometheus:v3.5.0
#COMPOSE_NGINX_IMAGE=nginx:1.28.0
#COMPOSE_VLLM_IMAGE=vllm/vllm-openai:v0.32.0
"""


def default_of(name: str, field: FieldInfo) -> str | None:
    """Write a default as the environment would carry it; None: the setting is required."""
    if field.is_required():
        return None
    value = field.default
    if name in PLACED:
        return PLACED[name]
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def rows() -> list[tuple[str, str, str | None, str]]:
    """Program, variable, default and description of every setting."""
    found = []
    for program, settings in PROGRAMS:
        prefix = settings.model_config.get("env_prefix", "")
        for key, field in settings.model_fields.items():
            name = prefix + key.upper()
            found.append((program, name, default_of(name, field), field.description or ""))
    return found


def env_example() -> str:
    lines = [COMPOSE]
    for program, _ in PROGRAMS:
        lines.append(f"\n# The {program}\n")
        for owner, name, default, description in rows():
            if owner == program:
                required = " (required)" if default is None else ""
                lines.append(f"# {description}{required}\n#{name}={default or ''}\n")
    return "".join(lines)


def page(program: str) -> str:
    """A program's table of settings, as Markdown."""
    lines = [
        f"# Settings of the {program}",
        "",
        "Environment variables, read once at start. `python -m scripts.docs.settings` writes this",
        "page from `settings.py` beside it; `.env.example` lists the settings of all programs.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for owner, name, default, description in rows():
        if owner == program:
            shown = "required" if default is None else f"`{default}`" if default else "unset"
            lines.append(f"| `{name}` | {shown} | {description} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    (ROOT / ".env.example").write_text(env_example(), "utf-8")
    for program, path in PAGES.items():
        (ROOT / path).write_text(page(program), "utf-8")


if __name__ == "__main__":
    main()

"""Write the settings of the three programs where people look for them: `.env.example` and README.

Run it after a change of settings; tests/test_layout.py fails when it was forgotten. README gets its
table between the two markers below; the first one alone will do to begin with.
"""

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from dashboard.settings import Settings as DashboardSettings
from engine.settings import Settings as EngineSettings
from gateway.base.settings import Settings as GatewaySettings
from scripts.stack import ROOT

BEGIN = "<!-- settings -->"
END = "<!-- /settings -->"
PROGRAMS: list[tuple[str, type[BaseSettings]]] = [
    ("gateway", GatewaySettings),
    ("engine", EngineSettings),
    ("dashboard", DashboardSettings),
]
# Defaults that depend on where the program is installed.
PLACED = {"ENGINE_MODEL": "engine/demo_model"}
COMPOSE = """# Settings for docker compose, and all others with their defaults.
# scripts/compose_env makes .env of this, with secrets.
# scripts/run needs none of this: it makes its secrets and keeps them in its data directory.

# docker compose: default, gpu or scale
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
# docker compose, profile gpu: number of GPUs
#COMPOSE_ENGINE_GPUS=1
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


def readme_table() -> str:
    lines = [BEGIN, "", "| variable | default | meaning |", "|---|---|---|"]
    for _, name, default, description in rows():
        shown = "required" if default is None else f"`{default}`" if default else "unset"
        lines.append(f"| `{name}` | {shown} | {description} |")
    return "\n".join([*lines, "", END])


def with_table(readme: str) -> str:
    """Replace what is between the markers; a text without them stays as it is."""
    before, begin, rest = readme.partition(BEGIN)
    if not begin:
        return readme
    return before + readme_table() + (rest.split(END, 1)[1] if END in rest else rest)


def main() -> None:
    (ROOT / ".env.example").write_text(env_example(), "utf-8")
    readme = ROOT / "README.md"
    if readme.exists():
        readme.write_text(with_table(readme.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()

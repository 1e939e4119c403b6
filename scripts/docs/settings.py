"""Write the programs' settings to `.env.example`, and as a table beside each `settings.py`.

Run it after a change of settings; tests/test_layout.py fails if it was forgotten.
"""

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dashboard.settings import Settings as DashboardSettings
from engine.settings import Settings as EngineSettings
from gateway.base.settings import Settings as GatewaySettings
from scripts.stack import ROOT

PROGRAMS: dict[str, tuple[type[BaseModel], str, str]] = {
    "gateway": (GatewaySettings, "HOLDFAST_", "gateway/base/SETTINGS.md"),
    "engine": (EngineSettings, "ENGINE_", "engine/SETTINGS.md"),
    "dashboard": (DashboardSettings, "DASHBOARD_", "dashboard/SETTINGS.md"),
}
# Defaults that depend on where the program is installed.
PLACED = {"ENGINE_MODEL": "engine/holdfast-demo"}
ENV_EXAMPLE = ROOT / ".env.example"
GENERATED = "\n\n# The gateway\n"
"""Where the generated part of `.env.example` begins. The part before it, for docker compose, is
written by hand."""
HEAD = """# Settings of the {program}

Environment variables, read once at start. `python -m scripts.docs.settings` writes this
page from `settings.py` beside it; `.env.example` lists the settings of all programs.
A variable that is empty counts as unset. A wrong value ends the start with exit code 2
and a line that names the variable and what it must be.

| variable | default | meaning |
|---|---|---|
"""


def default_of(name: str, field: FieldInfo) -> str:
    """Write a default as the environment would carry it; an empty text if there is none."""
    value = field.default
    if name in PLACED:
        return PLACED[name]
    if field.is_required() or value is None or isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def rows(program: str) -> list[tuple[str, str, bool, str]]:
    """The variable, the default, whether it is required, and the description of every setting."""
    settings, prefix, _ = PROGRAMS[program]
    table = []
    for key, field in settings.model_fields.items():
        name = prefix + key.upper()
        description = " ".join((field.description or "").split())
        table.append((name, default_of(name, field), field.is_required(), description))
    return table


def env_example() -> str:
    lines = [ENV_EXAMPLE.read_text("utf-8").partition(GENERATED)[0], "\n"]
    for program in PROGRAMS:
        lines.append(f"\n# The {program}\n")
        for name, default, is_required, description in rows(program):
            required = " (required)" if is_required else ""
            lines.append(f"# {description}{required}\n#{name}={default}\n")
    return "".join(lines)


def page(program: str) -> str:
    """A program's table of settings, as Markdown."""
    lines = [HEAD.format(program=program)]
    for name, default, is_required, description in rows(program):
        default_text = "required" if is_required else f"`{default}`" if default else "unset"
        lines.append(f"| `{name}` | {default_text} | {description} |\n")
    return "".join(lines)


def main() -> None:
    ENV_EXAMPLE.write_text(env_example(), "utf-8")
    for program, (_, _, path) in PROGRAMS.items():
        (ROOT / path).write_text(page(program), "utf-8")


if __name__ == "__main__":
    main()

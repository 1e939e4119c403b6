"""Write the programs' settings to `.env.example`, and as a table beside each `settings.py`.

Run it after a change of settings; tests/test_layout.py fails when it was forgotten.
"""

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dashboard.settings import Settings as DashboardSettings
from engine.settings import Settings as EngineSettings
from gateway.base.settings import Settings as GatewaySettings
from scripts.stack import ROOT

PROGRAMS: list[tuple[str, type[BaseModel]]] = [
    ("gateway", GatewaySettings),
    ("engine", EngineSettings),
    ("dashboard", DashboardSettings),
]
PREFIXES = {"gateway": "HOLDFAST_", "engine": "ENGINE_", "dashboard": "DASHBOARD_"}
PAGES = {
    "gateway": "gateway/base/SETTINGS.md",
    "engine": "engine/SETTINGS.md",
    "dashboard": "dashboard/SETTINGS.md",
}
# Defaults that depend on where the program is installed.
PLACED = {"ENGINE_MODEL": "engine/demo_model"}
ENV_EXAMPLE = ROOT / ".env.example"
GENERATED = "\n\n# The gateway\n"
"""Where the written part of `.env.example` begins; what docker compose reads before it is not."""


def default_of(name: str, field: FieldInfo) -> str | None:
    """Write a default as the environment would carry it; None: the setting is required."""
    if field.is_required():
        return None
    value = field.default
    if name in PLACED:
        return PLACED[name]
    if value is None or isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def rows() -> list[tuple[str, str, str | None, str]]:
    """Program, variable, default and description of every setting."""
    found = []
    for program, settings in PROGRAMS:
        prefix = PREFIXES[program]
        for key, field in settings.model_fields.items():
            name = prefix + key.upper()
            found.append(
                (
                    program,
                    name,
                    default_of(name, field),
                    " ".join((field.description or "").split()),
                )
            )
    return found


def env_example() -> str:
    by_hand = ENV_EXAMPLE.read_text("utf-8").partition(GENERATED)[0]
    lines = [by_hand, "\n"]
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
        "A variable that is empty counts as unset. A wrong value ends the start with exit code 2",
        "and a line that names the variable and what it must be.",
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
    ENV_EXAMPLE.write_text(env_example(), "utf-8")
    for program, path in PAGES.items():
        (ROOT / path).write_text(page(program), "utf-8")


if __name__ == "__main__":
    main()

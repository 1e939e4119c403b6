"""Write the alerts of `gateway/monitoring/alerts.yml` as sections of `gateway/OPERATING.md`.

Run it after a change of the alerts; tests/gateway/monitoring fails when it was forgotten.
"""

import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from scripts.stack import ROOT

ALERTS = ROOT / "gateway" / "monitoring" / "alerts.yml"
PAGE = ROOT / "gateway" / "OPERATING.md"
BEGIN, END = "<!-- alerts -->\n", "<!-- /alerts -->"
_NUMBERED = re.compile(r"(?:^|(?<= ))(?=\d\. )")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def linked(text: str) -> str:
    """The text, with a link at the name of each alert."""
    return re.sub(r"\bHoldfast[A-Z]\w+", lambda found: f"[{found[0]}](#{found[0].lower()})", text)


def minutes(written: str) -> str:
    """Prometheus' duration in words, such as `5m`."""
    number = int(written.removesuffix("m"))
    return f"{number} minute" if number == 1 else f"{number} minutes"


def section(rule: dict[str, Any]) -> str:
    said = rule["annotations"]
    since = f", after {minutes(rule['for'])}" if "for" in rule else ""
    steps = [step.strip() for step in _NUMBERED.split(said["resolution"]) if step.strip()]
    commands = [command.strip() for command in said["diagnosis"].split("; ")]
    lines = [
        f"### {rule['alert']}",
        "",
        f"*{rule['labels']['severity']}{since}.* {linked(said['summary'])}",
        "",
        f"**What it means.** {linked(said['impact'])}",
        "",
        "**What to look at.**",
        "",
        "```sh",
        *commands,
        "```",
        "",
        "**What to do.**",
        "",
        *(linked(step) for step in steps),
        "",
    ]
    return "\n".join(lines)


def page() -> str:
    """OPERATING.md with the sections as the alerts are now."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    sections = "\n".join(map(section, rules()))
    return f"{before}{BEGIN}\n{sections}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

"""Write facts that are declared elsewhere into the alerts and Grafana's board.

The classes of written tokens are those of `TTLS`, one for each lifetime. The severity and the
resolution of an alert are those of its kind of condition in gateway/conditions/kinds.toml. Run it
after a change of either: tests/gateway/monitoring fails until then.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from engine.protocol import WRITE_FIELDS
from gateway.conditions.kinds import KINDS
from scripts.stack import ROOT

MONITORING = ROOT / "gateway" / "monitoring"
FILES = ("alerts.yml", "grafana.json")
WRITES = "|".join(name.removesuffix("_tokens") for name in WRITE_FIELDS.values())
_WRITTEN = re.compile(r"cache_write_\w+(?:\|cache_write_\w+)*")
_RULE = re.compile(r"^  - alert: .*\n(?:    .*\n)*", re.MULTILINE)
_WIDTH = 112


def with_classes(text: str) -> str:
    """The text, with all classes of written tokens wherever it names any of them."""
    return _WRITTEN.sub(WRITES, text)


def with_conditions(text: str) -> str:
    """The rules, each with the severity and the resolution of its kind of condition."""
    kinds = {kind.alert: kind for kind in KINDS.values()}

    def rewrite(match: re.Match[str]) -> str:
        (rule,) = yaml.safe_load(match[0])
        kind = kinds.get(rule["alert"])
        if kind is None:
            return match[0]
        rewritten: dict[str, Any] = {
            **rule,
            "labels": {**rule["labels"], "severity": kind.severity},
            "annotations": {**rule["annotations"], "resolution": kind.remedy},
        }
        if rewritten == rule:
            return match[0]
        dumped = yaml.safe_dump([rewritten], sort_keys=False, width=_WIDTH, allow_unicode=True)
        return "".join(f"  {line}\n" for line in dumped.splitlines())

    return _RULE.sub(rewrite, text)


def main() -> None:
    for name in FILES:
        path: Path = MONITORING / name
        text = with_classes(path.read_text("utf-8"))
        path.write_text(with_conditions(text) if name == "alerts.yml" else text, "utf-8")


if __name__ == "__main__":
    main()

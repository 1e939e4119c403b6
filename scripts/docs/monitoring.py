"""Write into alerts and Grafana's board what stands elsewhere.

The classes of written tokens are those of `TTLS`, one for each lifetime. Severity and resolution of
the alert of each kind of condition are those of gateway/conditions/kinds.toml. Run it after a
change of them; tests/gateway/monitoring fails when it was forgotten.
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
    """The text, with every class of written tokens where it names one of them."""
    return _WRITTEN.sub(WRITES, text)


def with_conditions(text: str) -> str:
    """The rules, with severity and resolution of the kind of condition that each is of."""
    kinds = {kind.alert: kind for kind in KINDS.values()}

    def written(match: re.Match[str]) -> str:
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

    return _RULE.sub(written, text)


def main() -> None:
    for name in FILES:
        path: Path = MONITORING / name
        text = with_classes(path.read_text("utf-8"))
        path.write_text(with_conditions(text) if name == "alerts.yml" else text, "utf-8")


if __name__ == "__main__":
    main()

"""Lint, render and validate the chart without a cluster, with the packages of the group `chart`.

    python tests/chart/render.py CHART < VALUES.json > MANIFESTS.json

The answer is an object with `manifests`, or with `error`: what Helm or Kubernetes' schemas refuse.
"""

import json
import sys
from typing import Any

import helm_python
import kubernetes_validate
import yaml

# Custom resources: Kubernetes' own schemas have none of them.
CUSTOM = {"HTTPRoute", "PodMonitor", "PrometheusRule"}
VERSION = "1.31"


def rendered(chart: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    problems = helm_python.lint(chart, values, strict=True)["errors"]
    assert not problems, problems
    files = helm_python.Chart.load(chart).render(values, name="hf", namespace="prod")
    manifests = [m for text in files.values() for m in yaml.safe_load_all(text) if m]
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
    return manifests


try:
    answer: dict[str, Any] = {"manifests": rendered(sys.argv[1], json.load(sys.stdin))}
except (helm_python.HelmError, kubernetes_validate.ValidationError, AssertionError) as error:
    answer = {"error": str(error)}
json.dump(answer, sys.stdout)

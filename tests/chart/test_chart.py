"""The Helm chart: rendered, linted, validated strictly, held to policies, and run.

Helm is in an environment of its own (`scripts/long_tests chart`), which CHART_PYTHON names. No
cluster is at hand: the containers' commands run as processes on loopback, with the environment and
the probes that the chart gives them, and their gateway finds its engine by a fake of Kubernetes'
API. So the names, ports and paths in the chart are the programs' own.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from scripts.stack import ROOT, free_port
from tests.conformance.engines import VLLM_ON_CPU
from tests.gateway.routing.test_discovery import FakeApi
from tests.gateway.serving import eventually, serve

CHART = ROOT / "scripts" / "chart"
HELM = os.environ.get("CHART_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not HELM, reason="CHART_PYTHON is not set: scripts/long_tests chart"
)
Manifest = dict[str, Any]

EVERYTHING: Manifest = {
    "gateway": {"autoscaling": {"enabled": True}, "settings": {"HOLDFAST_LOG_LEVEL": "debug"}},
    "engine": {"store": {"size": "10Gi"}, "settings": {"ENGINE_NUM_BLOCKS": 512}},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls"},
    "httpRoute": {"enabled": True, "gateway": "edge", "gatewayNamespace": "edge"},
    "monitoring": {"podMonitor": True, "rules": True, "grafana": True, "labels": {"release": "p"}},
}
VLLM: Manifest = {"engine": {"kind": "vllm", "model": "m", "vllmFlags": "--max-model-len 4096"}}
ELSEWHERE: Manifest = {"engine": {"kind": "none", "urls": "http://one:8100"}}
# The image's digest and its pull policy are the operator's values; the settings are environment
# variables, secrets too; a gateway's token is what it follows endpoints with.
needs_vllm = [
    pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter"),
    pytest.mark.timeout(900),
]
# The demo model by its own name, since vLLM calls it by its path.
ON_CPU = (
    "--enforce-eager --dtype float32 --max-model-len 4096 --block-size 32 "
    "--served-model-name holdfast-demo"
)
START_SECONDS = 300.0
SKIPPED = "CKV_K8S_43,CKV_K8S_15,CKV_K8S_35,CKV_K8S_38"


def answer(values: Manifest) -> dict[str, Any]:
    process = subprocess.run(
        [HELM, ROOT / "tests" / "chart" / "render.py", CHART],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    rendered: dict[str, Any] = json.loads(process.stdout)
    return rendered


def render(values: Manifest) -> dict[tuple[str, str], Manifest]:
    reply = answer(values)
    assert "error" not in reply, reply["error"]
    return {(m["kind"], m["metadata"]["name"]): m for m in reply["manifests"]}


@pytest.mark.parametrize("values", [{}, EVERYTHING, VLLM, ELSEWHERE])
def test_it_renders_strictly_and_selectors_find_their_pods(values: Manifest) -> None:
    manifests = render(values)
    pods = [
        manifest["spec"]["template"]
        for manifest in manifests.values()
        if "template" in manifest.get("spec", {})
    ]
    labels = [pod["metadata"]["labels"] for pod in pods]
    for (kind, name), manifest in manifests.items():
        assert manifest["metadata"]["namespace"] == "prod"
        selector = {
            "Service": lambda m: m["spec"]["selector"],
            "PodDisruptionBudget": lambda m: m["spec"]["selector"]["matchLabels"],
            "PodMonitor": lambda m: m["spec"]["selector"]["matchLabels"],
        }.get(kind)
        if selector is not None:
            selected_labels = selector(manifest).items()
            assert any(selected_labels <= labels_of_pod.items() for labels_of_pod in labels), (
                kind,
                name,
            )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 2}}, "replica"),
        ({"engine": {"kind": "vlm"}}, "/engine/kind"),
        ({"gateway": {"settings": {"HOLDFSAT_PORT": 1}}}, "HOLDFSAT_PORT"),
        ({"engine": {"kind": "none"}}, "engine.urls"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.gateway"),
    ],
)
def test_a_misspelt_or_missing_value_is_refused(values: Manifest, named: str) -> None:
    assert named in answer(values)["error"]


@pytest.mark.parametrize("values", [EVERYTHING, VLLM])
def test_policies_are_kept(values: Manifest, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all(render(values).values()))
    checkov = Path(HELM).with_name("checkov")
    options = ["--framework", "kubernetes", "--compact", "--quiet", "--skip-check", SKIPPED]
    ran = subprocess.run(
        [checkov, "-f", file, *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"Passed checks: [1-9]\d\d, Failed checks: 0", ran.stdout), ran.stdout


def test_alerts_and_dashboard_are_those_of_the_project() -> None:
    manifests = render(EVERYTHING)
    alerts = yaml.safe_load((ROOT / "gateway" / "monitoring" / "alerts.yml").read_text())
    assert manifests["PrometheusRule", "hf-gateway"]["spec"] == alerts
    board = manifests["ConfigMap", "hf-gateway"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    text = (ROOT / "gateway" / "monitoring" / "grafana.json").read_text()
    assert json.loads(board["data"]["holdfast.json"]) == json.loads(text)


class Pod:
    """A pod's only container as a process, with its own environment and nothing else of ours."""

    def __init__(self, manifest: Manifest, data: Path, secrets: dict[str, str]) -> None:
        self.spec = manifest["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.directory = data / self.container["name"]
        self.port = free_port()
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(data), "HF_HUB_OFFLINE": "1"}
        for variable in self.container["env"]:
            value = variable.get("value")
            if value is None:
                value = secrets[variable["valueFrom"]["secretKeyRef"]["key"]]
            self.environment[variable["name"]] = self._here(variable["name"], value)

    def _here(self, name: str, value: str) -> str:
        """What can't be the same on a machine of one's own: the port, the address, the volumes."""
        if name.endswith("_PORT") and self.container.get("ports"):
            (port,) = self.container["ports"]
            assert value == str(port["containerPort"])
            return str(self.port)
        mounts = [mount["mountPath"] for mount in self.container["volumeMounts"]]
        if value.startswith("/") and not value.startswith("/app/"):
            assert any(value == mount or value.startswith(f"{mount}/") for mount in mounts), name
            (self.directory / value[1:]).parent.mkdir(parents=True, exist_ok=True)
            return str(self.directory / value[1:])
        return {"0.0.0.0": "127.0.0.1"}.get(value, value.replace("/app/engine/", f"{ROOT}/engine/"))

    def command(self) -> list[str]:
        program, *arguments = self.container["command"]
        assert program == "python"
        return [sys.executable, *arguments]

    def is_content(self, probe: str, process: subprocess.Popen[bytes]) -> bool:
        return process.poll() is not None or self.probe(probe)

    @contextmanager
    def run(self) -> Iterator[str]:
        """Until the startup probe is content; the liveness probe must be so too, and SIGTERM ends
        it well within its grace."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("w") as log:
            process = subprocess.Popen(
                self.command(), cwd=ROOT, env=self.environment, stdout=log, stderr=log
            )
            try:
                for probe in ("startupProbe", "livenessProbe"):
                    eventually(partial(self.is_content, probe, process), START_SECONDS)
                assert process.poll() is None, (self.directory / "log").read_text()[-2000:]
                yield f"http://127.0.0.1:{self.port}"
            finally:
                process.terminate()
                process.wait(self.spec.get("terminationGracePeriodSeconds", 30) + 60)

    def probe(self, name: str) -> bool:
        """As the kubelet asks: the host is the pod's address, unless the probe names one."""
        http_get = self.container[name]["httpGet"]
        assert http_get["port"] == self.container["ports"][0]["name"]
        headers = {"host": f"10.0.0.7:{self.container['ports'][0]['containerPort']}"}
        headers |= {
            header["name"].lower(): header["value"] for header in http_get.get("httpHeaders", [])
        }
        url = f"http://127.0.0.1:{self.port}{http_get['path']}"
        try:
            return httpx.get(url, headers=headers, timeout=10).status_code == 200
        except httpx.HTTPError:
            return False


class VllmPod(Pod):
    """Its command is the image's, whose vLLM is that of VLLM_PYTHON here, on a CPU."""

    def command(self) -> list[str]:
        assert "command" not in self.container
        image = (ROOT / "engine" / "Dockerfile.gpu").read_text("utf-8")
        shell, option, line = json.loads(image.rpartition("CMD ")[2])
        assert "python3 -m" in line and "--host 0.0.0.0 --port 8000 " in line
        line = line.replace("python3 -m", f"{os.environ['VLLM_PYTHON']} -m")
        line = line.replace("--host 0.0.0.0 --port 8000 ", f"--host 127.0.0.1 --port {self.port} ")
        plugins = re.search(r"VLLM_PLUGINS=\S+", image)
        assert plugins is not None
        self.environment |= {**VLLM_ON_CPU, **dict([plugins[0].split("=")])}
        return [shell, option, line]


KINDS = ["native", pytest.param("vllm", marks=needs_vllm)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_starts_serves_and_is_probed(tmp_path: Path, kind: str) -> None:
    engine_values = {**EVERYTHING["engine"], "kind": kind}
    if kind == "vllm":
        engine_values = {
            "kind": kind,
            "vllmFlags": ON_CPU,
            "settings": {"ENGINE_MIN_CACHE_TOKENS": 32},
        }
    manifests = render({"gateway": {"drainSeconds": 0}, "engine": engine_values})
    secrets = {
        "HOLDFAST_DATABASE_URL": f"sqlite+aiosqlite:///{tmp_path}/ledger.db",
        "HOLDFAST_ENGINE_SECRET": "a-secret-of-16-and-more",
        "HOLDFAST_MASTER_SECRET": "another-secret-of-16-and-more",
        "HOLDFAST_ADMIN_KEY": "hf-admin",
        "HOLDFAST_API_KEY": "hf-key",
    }
    migrate = Pod(manifests["Job", "hf-migrate"], tmp_path, secrets)
    migrate.directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(migrate.command(), cwd=ROOT, env=migrate.environment, check=True, timeout=300)
    gateway = Pod(manifests["StatefulSet", "hf-gateway"], tmp_path, secrets)
    pod_type = Pod if kind == "native" else VllmPod
    engine = pod_type(manifests["StatefulSet", "hf-engine"], tmp_path, secrets)
    dashboard = Pod(manifests["Deployment", "hf-dashboard"], tmp_path, secrets)
    api = FakeApi(service="hf-engine")
    service = manifests["Service", "hf-engine"]
    role = manifests["Role", "hf-gateway"]["rules"]
    assert role[0]["resources"] == ["endpointslices"] and role[0]["verbs"] == ["list", "watch"]
    with ExitStack() as stack:
        address = stack.enter_context(serve(api))
        path = "" if kind == "native" else "/holdfast"
        assert gateway.environment["HOLDFAST_ENGINES"] == f"kubernetes://prod/hf-engine:http{path}"
        assert service["spec"]["ports"][0]["name"] == "http"
        gateway.environment["HOLDFAST_ENGINES"] += f"?api={address}"
        url = stack.enter_context(gateway.run())
        assert not gateway.probe("readinessProbe")  # without an engine
        behind = stack.enter_context(engine.run())
        assert engine.probe("readinessProbe")
        api.put("a", behind, targetRef={"kind": "Pod", "name": "hf-engine-0"})
        eventually(lambda: gateway.probe("readinessProbe"))
        body = {"model": "holdfast-demo", "max_tokens": 4}
        answered = httpx.post(
            f"{url}/v1/messages",
            json={**body, "messages": [{"role": "user", "content": "What is a lease?"}]},
            headers={"x-api-key": "hf-key", "anthropic-version": "2023-06-01"},
            timeout=120,
        )
        assert answered.status_code == 200, answered.text
        # The dashboard asks the Service; here that is the process's own address.
        port = manifests["Service", "hf-gateway"]["spec"]["ports"][0]["port"]
        assert dashboard.environment["DASHBOARD_GATEWAY_URL"] == f"http://hf-gateway:{port}"
        dashboard.environment["DASHBOARD_GATEWAY_URL"] = url
        stack.enter_context(dashboard.run())
        assert dashboard.probe("readinessProbe")

"""docker-compose.yml: what holds of every service, in every profile, without a Docker engine."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from engine.settings import Settings as EngineSettings
from gateway.base.settings import load as load_gateway
from scripts.compose.make_secrets import make_all, summary
from scripts.runner.data import example_request
from scripts.runner.options import DEMO_MODEL
from scripts.stack import ROOT

COMPOSE = ROOT / "docker-compose.yml"
MONITORING = ROOT / "gateway" / "monitoring"
TEXT = COMPOSE.read_text("utf-8")
COMPOSED: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSED["services"]
NGINX = (ROOT / "scripts" / "compose" / "nginx.conf").read_text("utf-8")
PROFILES = ("default", "gpu", "attach", "scale")
SECRETS = {
    "HOLDFAST_API_KEY",
    "HOLDFAST_ADMIN_KEY",
    "HOLDFAST_ENGINE_SECRET",
    "HOLDFAST_MASTER_SECRET",
    "POSTGRES_PASSWORD",
}
ONE_SHOTS = ("keys", "migrate")
SECOND_FILE = ROOT / "scripts" / "compose" / "profiles.yml"
SELECTION = {"COMPOSE_PROFILES", "COMPOSE_FILE"}
every_profile = pytest.mark.parametrize("profile", PROFILES)


def of_profile(profile: str) -> set[str]:
    """The services of a profile, by both files."""
    second = yaml.safe_load(SECOND_FILE.read_text("utf-8"))["services"]
    assert set(second) <= set(SERVICES)
    services = {name: service | second.get(name, {}) for name, service in SERVICES.items()}
    return {name for name, s in services.items() if profile in s.get("profiles", [profile])}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_can_do_no_more_than_it_must_and_says_how_it_is(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "network_mode" not in service
    assert str(service["user"]).partition(":")[0] not in ("0", "root")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert service["mem_limit"] and service["cpus"] and service["pids_limit"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    image, _, tag = service["image"].rpartition(":")
    assert image and re.match(r"v?\d+\.\d+(\.\d+)?", tag)
    if name in ONE_SHOTS:
        assert service["restart"] == "no"
        return
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["stop_grace_period"]


def test_secrets_are_files_and_come_from_the_service_that_makes_them() -> None:
    """So `.env` need not name any, and none has a value that others know."""
    for secret in SECRETS:
        uses = re.findall(r"\$\{" + secret + r"\b([^}]*)\}", TEXT)
        assert uses == [":-"], "only `keys` is told what .env has"
    assert ":?" not in TEXT, "nothing must be set"
    for name, service in SERVICES.items():
        if name != "keys":
            assert not SECRETS & set(service.get("environment", {}))
            mounted = [v for v in service.get("volumes", []) if "secret" in v]
            assert all(volume.endswith(":ro") for volume in mounted)
            assert not mounted or "keys" in service["depends_on"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_knows_no_secret_that_it_does_not_need(name: str) -> None:
    volumes = {v.partition(":")[0] for v in SERVICES[name].get("volumes", []) if "secret" in v}
    circles = {
        "database-secret": ("keys", "db", "migrate"),
        "gateway-secrets": ("keys",),
        "engine-secret": ("keys", "engine"),
    }
    is_gateway = "gateway" in name
    for volume, names in circles.items():
        is_engine = "engine" in names and name.startswith("engine")
        assert (volume in volumes) == (name in names or is_engine or is_gateway)


@every_profile
def test_a_profile_has_what_it_needs_and_each_port_and_journal_once(profile: str) -> None:
    named = of_profile(profile)
    assert {"keys", "db", "migrate", "dashboard"} <= named
    ports = []
    journals = []
    for name in named:
        service = SERVICES[name]
        for dependency, need in service.get("depends_on", {}).items():
            assert dependency in named or need.get("required") is False
            is_one_shot = need["condition"] == "service_completed_successfully"
            assert is_one_shot == (dependency in ONE_SHOTS)
        assert set(service["networks"]) <= set(COMPOSED["networks"])
        mounted = {volume.partition(":")[0] for volume in service.get("volumes", [])}
        of_ours = {volume for volume in mounted if volume.startswith(".")}
        assert mounted - of_ours <= set(COMPOSED["volumes"])
        assert all((ROOT / path).exists() for path in of_ours)
        ports += service.get("ports", [])
        journals += [volume for volume in mounted if volume.startswith("journal")]
    assert len(ports) == len(set(ports)) == 3
    assert len(journals) == len(set(journals)) == (2 if profile == "scale" else 1)


def test_the_database_cannot_be_reached_from_outside() -> None:
    assert SERVICES["db"]["networks"] == ["database"] and "ports" not in SERVICES["db"]
    assert COMPOSED["networks"]["database"] == {"internal": True}
    assert "database" not in SERVICES["dashboard"]["networks"]


def test_the_balancer_finds_both_gateways_and_is_found_under_their_name() -> None:
    (alias,) = re.findall(r"set \$gateways (\S+);", NGINX)
    behind = [n for n in SERVICES if n.startswith("gateway-")]
    assert len(behind) == 2
    assert all(SERVICES[n]["networks"]["front"]["aliases"] == [alias] for n in behind)
    (balancer_alias,) = SERVICES["balancer"]["networks"]["front"]["aliases"]
    url = SERVICES["dashboard"]["environment"]["DASHBOARD_GATEWAY_URL"]
    assert url == f"http://{balancer_alias}:8080" == "http://gateway:8080"
    (size,) = re.findall(r"^\s*client_body_buffer_size (\d+)m;", NGINX, re.M)
    assert int(size) >= 1, "a request's tenant's text is not written to a disk"


@pytest.mark.parametrize("profile", ["default", "gpu", "scale"])
def test_prometheus_asks_every_gateway_and_engine_of_its_profile_by_its_name(profile: str) -> None:
    """One variable of the dashboard chooses an engine's figures and the gateway's of it."""
    folder = MONITORING / "targets" / profile
    by_engine = {}
    for kind, port in (("gateway", 8080), ("engine", 8100)):
        groups = yaml.safe_load((folder / f"{kind}s.yml").read_text("utf-8"))
        targets = {target for group in groups for target in group["targets"]}
        if profile != "gpu":
            wanted = {f"{n}:{port}" for n in of_profile(profile) if n.startswith(kind)}
            assert targets == wanted
        by_engine = {g.get("labels", {}).get("engine"): t for g in groups for t in g["targets"]}
    for name in of_profile(profile):
        if name.startswith("gateway"):
            engines = SERVICES[name]["environment"]["HOLDFAST_ENGINES"].split(",")
            named = dict(engine.split("=", 1) for engine in engines)
            assert by_engine == {engine: urlsplit(url).netloc for engine, url in named.items()}
        if name.startswith("prometheus"):
            mount = f"./gateway/monitoring/targets/{profile}:/etc/targets:ro"
            assert mount in SERVICES[name]["volumes"]


def relabeled(target: str) -> dict[str, str] | None:
    """A target of prometheus.yml's job of engines, as its rules leave it; None where one drops it.

    They are Prometheus's: a rule whose expression fits whole sets its label.
    """
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    (rules,) = [job["relabel_configs"] for job in jobs if job["job_name"] == "holdfast-engine"]
    labels = {"__address__": target}
    for rule in rules:
        (source,) = rule["source_labels"]
        fitting = re.fullmatch(rule["regex"], labels[source])
        if fitting is None:
            continue
        if rule.get("action") == "drop":
            return None
        template = rule.get("replacement", "$1").replace("$1", r"\1")
        labels[rule["target_label"]] = fitting.expand(template)
    return labels


@pytest.mark.parametrize(
    ("engine", "labels"),
    [
        ("engine:8100", {"__address__": "engine:8100"}),
        (
            "engine-0=http://host.docker.internal:8000/holdfast",
            {
                "engine": "engine-0",
                "__scheme__": "http",
                "__address__": "host.docker.internal:8000",
                "__metrics_path__": "/holdfast/metrics",
            },
        ),
        (
            "https://[::1]:8000/vllm/holdfast/",
            {
                "engine": "[::1]:8000",
                "__scheme__": "https",
                "__address__": "[::1]:8000",
                "__metrics_path__": "/vllm/holdfast/metrics",
            },
        ),
        (
            "http://gpu-1:8100",
            {"engine": "gpu-1:8100", "__scheme__": "http", "__address__": "gpu-1:8100"},
        ),
        ("dns://engines:8100", None),
        ("kubernetes://holdfast/engines", None),
    ],
)
def test_prometheus_asks_what_the_gateway_stands_before(
    engine: str, labels: dict[str, str] | None
) -> None:
    assert relabeled(engine) == labels


def test_prometheus_of_attach_is_told_what_its_gateway_is_told(tmp_path: Path) -> None:
    gateway = SERVICES["attached-gateway"]
    prometheus = SERVICES["prometheus-attach"]
    assert prometheus["environment"] == {
        "HOLDFAST_ENGINES": gateway["environment"]["HOLDFAST_ENGINES"]
    }
    assert prometheus["extra_hosts"] == gateway["extra_hosts"]
    shell, mounted = prometheus["entrypoint"]
    text = (MONITORING / "targets" / "attach" / Path(mounted).name).read_text("utf-8")
    engines_path = tmp_path / "engines.yml"
    (tmp_path / "prometheus").write_text('#!/bin/sh\nprintf %s "$*"\n')
    (tmp_path / "prometheus").chmod(0o755)
    script = text.replace("/tmp/engines.yml", str(engines_path))
    assert script != text
    engines = "engine-0=http://[::1]:8000/holdfast , http://b:8100,c=https://c/holdfast"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOLDFAST_ENGINES": engines}
    command = [shell, "-c", script, "start", "--config.file=x", "--storage=y"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == "--config.file=x --storage=y"
    (group,) = yaml.safe_load(engines_path.read_text("utf-8"))
    assert group["targets"] == [engine.strip() for engine in engines.split(",")]


def run_compose_env(
    folder: Path, profile: str, *options: str
) -> "subprocess.CompletedProcess[str]":
    command = [ROOT / "scripts" / "compose_env", *options, profile, folder / "made.env"]
    return subprocess.run(command, capture_output=True, text=True)


def test_attaching_takes_the_words_of_scripts_run(tmp_path: Path) -> None:
    secret = ("--secret", "secret-of-the-vllm")
    first = ("--attach", "http://gpu-1:8000/holdfast")
    second = ("--attach", "https://gpu-2/holdfast")
    for wrong, words in (
        (first, "--attach needs --secret"),
        (secret, "that --attach names"),
        (("--attach", "gpu-1:8000", *secret), "must be an address"),
        (("--attach", "http://gpu|1", *secret), "must be an address"),
        ((*first, "--secret", "short"), "16 characters or more"),
        ((*first, "--secret", "of several words"), "must be of letters"),
        (("--attached", "x"), "the options are --attach and --secret"),
    ):
        process = run_compose_env(tmp_path, "attach", *wrong)
        assert process.returncode == 2 and words in process.stderr, wrong
        assert len(process.stderr.splitlines()) == 1
    assert run_compose_env(tmp_path, "scale", *first, *secret).returncode == 2
    assert run_compose_env(tmp_path, "attach", *first, *second, *secret).returncode == 0
    text = (tmp_path / "made.env").read_text("utf-8")
    lines = dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))
    assert lines["COMPOSE_PROFILES"] == "attach"
    assert lines["HOLDFAST_ENGINE_SECRET"] == secret[1]
    assert lines["HOLDFAST_ENGINES"] == f"engine-0={first[1]},engine-1={second[1]}"


def test_secrets_are_made_once_each_their_own_and_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "made.env"
    assert run_compose_env(tmp_path, "large").returncode == 2 and not path.exists()
    assert run_compose_env(tmp_path, "scale").returncode == 0
    text = path.read_text("utf-8")
    lines = dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))
    assert set(lines) == SECRETS | {"COMPOSE_PROFILES", "COMPOSE_FILE"}
    assert lines["COMPOSE_PROFILES"] == "scale"
    files = [ROOT / name for name in lines["COMPOSE_FILE"].split(":")]
    assert files == [COMPOSE, SECOND_FILE]
    values = {lines[secret] for secret in SECRETS}
    assert len(values) == len(SECRETS) and min(map(len, values)) >= 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = run_compose_env(tmp_path, "scale")
    assert again.returncode == 1 and "there already" in again.stderr
    assert path.read_text("utf-8") == text


def folders(root: Path) -> Path:
    """As the image has them, and the volumes that Docker makes of them."""
    for name in ("database", "engine", "gateway"):
        (root / name).mkdir(parents=True)
    return root


def stored(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in files}


def test_the_keys_are_made_once_and_a_gateway_and_an_engine_read_them(tmp_path: Path) -> None:
    root = folders(tmp_path)
    keys = make_all(root, {})
    first = stored(root)
    assert set(first) == {
        *("database/password", "database/url"),
        *("engine/engine_secret", "gateway/master_secret"),
        *("gateway/api_key", "gateway/admin_key"),
    }
    assert make_all(root, {}) == keys and stored(root) == first
    assert len(set(first.values())) == len(first)
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in first}
    assert all(mode == (0o444 if "database" in n else 0o400) for n, mode in modes.items())
    files = {
        name: value.replace("/secrets", str(root))
        for name, value in SERVICES["gateway"]["environment"].items()
        if name.endswith("_FILE")
    }
    gateway = load_gateway(files)
    engine = EngineSettings(_secrets_dir=root / "engine")  # type: ignore[call-arg]
    assert gateway.engine_secret == engine.secret
    assert gateway.api_key and gateway.api_key.get_secret_value() == keys["HOLDFAST_API_KEY"]
    assert first["database/password"] in gateway.database_url
    output = summary(keys, {"PUBLISHED_GATEWAY_PORT": "9090"})
    assert all(key in output for key in keys.values()) and "127.0.0.1:9090/v1/messages" in output
    assert not any(first[name] in output for name in ("gateway/master_secret", "database/password"))


def test_what_env_names_goes_before_what_was_made_and_is_not_printed(tmp_path: Path) -> None:
    root = folders(tmp_path)
    made_before = make_all(root, {})
    environment = {
        "HOLDFAST_API_KEY": "hf-mine",
        "POSTGRES_PASSWORD": "mine",
        "HOLDFAST_ADMIN_KEY": "",
    }
    keys = make_all(root, environment)
    files = stored(root)
    assert files["gateway/api_key"] == "hf-mine" and files["database/password"] == "mine"
    assert ":mine@" in files["database/url"]
    assert keys == {**made_before, "HOLDFAST_API_KEY": ""}
    assert "hf-mine" not in summary(keys, environment)


def test_the_printed_request_is_the_one_of_the_demo() -> None:
    (path,) = re.findall(
        r"-d @(\S+)", summary({"HOLDFAST_API_KEY": "", "HOLDFAST_ADMIN_KEY": ""}, {})
    )
    assert (ROOT / path).read_text("utf-8") == example_request(DEMO_MODEL)


def compose(*arguments: str) -> "subprocess.CompletedProcess[str]":
    quiet = {k: v for k, v in os.environ.items() if k not in SECRETS | SELECTION}
    command = ["docker", "compose", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=quiet, cwd=ROOT)


@pytest.fixture
def has_compose() -> None:
    if shutil.which("docker") is None or compose("version").returncode != 0:
        pytest.skip("no docker compose")


@pytest.mark.usefixtures("has_compose")
@every_profile
def test_compose_itself_accepts_every_profile(profile: str, tmp_path: Path) -> None:
    run_compose_env(tmp_path, profile)
    listed = compose("--env-file", str(tmp_path / "made.env"), "config", "--services")
    assert listed.returncode == 0, listed.stderr
    assert set(listed.stdout.split()) == of_profile(profile)


@pytest.mark.usefixtures("has_compose")
def test_compose_starts_the_default_without_env_and_without_a_profile(tmp_path: Path) -> None:
    empty = tmp_path / "empty.env"
    empty.write_text("", "utf-8")
    listed = compose("--env-file", str(empty), "config", "--services")
    assert listed.returncode == 0, listed.stderr
    assert set(listed.stdout.split()) == of_profile("default")

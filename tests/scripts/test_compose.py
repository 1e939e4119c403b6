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

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
PROFILES = ("default", "gpu", "attach", "scale")
SECRETS = {
    "HOLDFAST_API_KEY",
    "HOLDFAST_ADMIN_KEY",
    "HOLDFAST_ENGINE_SECRET",
    "HOLDFAST_MASTER_SECRET",
    "POSTGRES_PASSWORD",
}
ONE_SHOT = "migrate"
BASE_IMAGE = re.compile(r"^ARG \w+_IMAGE=(\S+)$", re.MULTILINE)
Service = dict[str, Any]


def composed() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))
    return loaded


SERVICES: dict[str, Service] = composed()["services"]
every_service = pytest.mark.parametrize("name", sorted(SERVICES))


def of_profile(profile: str) -> set[str]:
    return {n for n, s in SERVICES.items() if profile in s.get("profiles", [profile])}


def required_variables(value: Any) -> set[str]:
    return set(re.findall(r"\$\{(\w+):\?", str(value)))


def test_the_head_of_the_example_names_the_settings_that_compose_hands_on() -> None:
    example = (ROOT / ".env.example").read_text("utf-8")
    by_hand, _, generated = example.partition("\n# The gateway\n")
    settings = set(re.findall(r"^#([A-Z_]+)=", generated, re.MULTILINE))
    handed_on = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE.read_text("utf-8")))
    head = by_hand.partition("\n\n")[0]
    assert set(re.findall(r"[A-Z]+(?:_[A-Z]+)+", head)) == settings & handed_on - SECRETS


@every_service
def test_a_service_can_do_no_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "network_mode" not in service
    assert str(service["user"]).partition(":")[0] not in ("0", "root")


@every_service
def test_a_service_has_limits_and_bounded_logs(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"] and service["cpus"] and service["pids_limit"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}


@every_service
def test_a_service_restarts_and_says_how_it_is(name: str) -> None:
    service = SERVICES[name]
    if name == ONE_SHOT:
        assert service["restart"] == "no"
        return
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["stop_grace_period"]


@every_service
def test_an_image_is_pinned_to_a_version(name: str) -> None:
    image, _, tag = SERVICES[name]["image"].rpartition(":")
    assert image and re.match(r"v?\d+\.\d+(\.\d+)?", tag)
    if "build" in SERVICES[name]:
        recipe = (ROOT / SERVICES[name]["build"]["dockerfile"]).read_text("utf-8")
        bases = BASE_IMAGE.findall(recipe)
        assert bases and all(re.search(r":v?\d+\.\d+\.\d+", base) for base in bases)
        # Several stages: what compiles and installs is left behind. The engine has one for kernels.
        stages = 4 if " AS kernels\n" in recipe else 3
        assert recipe.count("\nFROM ") == stages and "\nUSER holdfast\n" in recipe


@every_service
def test_ports_are_open_to_this_machine_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


def test_no_password_has_a_default() -> None:
    text = COMPOSE.read_text("utf-8")
    for secret in SECRETS:
        uses = re.findall(r"\$\{" + secret + r"\b([^}]*)\}", text)
        assert uses and all(use.startswith(":?") for use in uses)
    assert required_variables(text) == SECRETS


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_profile_needs_is_in_it(profile: str) -> None:
    named = of_profile(profile)
    assert {"db", "migrate", "dashboard"} <= named
    networks, volumes = set(composed()["networks"]), set(composed()["volumes"])
    for name in named:
        needs = SERVICES[name].get("depends_on", {})
        for other, need in needs.items():
            assert other in named or need.get("required") is False
            is_one_shot = need["condition"] == "service_completed_successfully"
            assert is_one_shot == (other == ONE_SHOT)
        assert set(SERVICES[name]["networks"]) <= networks
        mounted = {volume.partition(":")[0] for volume in SERVICES[name].get("volumes", [])}
        assert {volume for volume in mounted if not volume.startswith(".")} <= volumes
        assert all((ROOT / path).exists() for path in mounted if path.startswith("."))


@pytest.mark.parametrize("profile", PROFILES)
def test_only_one_service_of_a_profile_takes_each_port_and_each_journal(profile: str) -> None:
    ports = [port for name in of_profile(profile) for port in SERVICES[name].get("ports", [])]
    assert len(ports) == len(set(ports)) == 3
    journals = [
        volume
        for name in of_profile(profile)
        for volume in SERVICES[name].get("volumes", [])
        if volume.startswith("journal")
    ]
    assert len(journals) == len(set(journals)) == (2 if profile == "scale" else 1)


def test_the_database_cannot_be_reached_from_outside() -> None:
    assert SERVICES["db"]["networks"] == ["database"] and "ports" not in SERVICES["db"]
    assert composed()["networks"]["database"] == {"internal": True}
    assert "database" not in SERVICES["dashboard"]["networks"]


def test_the_balancer_finds_both_gateways_and_is_found_under_their_name() -> None:
    conf = (ROOT / "scripts" / "compose" / "nginx.conf").read_text("utf-8")
    (alias,) = re.findall(r"set \$gateways (\S+);", conf)
    behind = [n for n in SERVICES if n.startswith("gateway-")]
    assert len(behind) == 2
    for name in behind:
        assert SERVICES[name]["networks"]["front"]["aliases"] == [alias]
    url = SERVICES["dashboard"]["environment"]["DASHBOARD_GATEWAY_URL"]
    assert [f"http://{a}:8080" for a in SERVICES["balancer"]["networks"]["front"]["aliases"]] == [
        url
    ]
    assert url == "http://gateway:8080"


@pytest.mark.parametrize("profile", ["default", "scale"])
def test_prometheus_asks_every_gateway_and_engine_of_its_profile(profile: str) -> None:
    folder = ROOT / "gateway" / "monitoring" / "targets" / profile
    for kind, port in (("gateway", 8080), ("engine", 8100)):
        groups = yaml.safe_load((folder / f"{kind}s.yml").read_text("utf-8"))
        wanted = {f"{n}:{port}" for n in of_profile(profile) if n.startswith(kind)}
        assert {target for group in groups for target in group["targets"]} == wanted
    (service,) = (n for n in of_profile(profile) if n.startswith("prometheus"))
    mounts = SERVICES[service]["volumes"]
    assert f"./gateway/monitoring/targets/{profile}:/etc/targets:ro" in mounts


@pytest.mark.parametrize("profile", ["default", "gpu", "scale"])
def test_engines_have_the_same_names_in_prometheus_as_at_the_gateway(profile: str) -> None:
    """So that one variable of the dashboard chooses both."""
    file = ROOT / "gateway" / "monitoring" / "targets" / profile / "engines.yml"
    told = {
        group["labels"]["engine"]: target
        for group in yaml.safe_load(file.read_text("utf-8"))
        for target in group["targets"]
    }
    gateways = [SERVICES[n] for n in of_profile(profile) if n.startswith("gateway")]
    for gateway in gateways:
        engines = gateway["environment"]["HOLDFAST_ENGINES"].split(",")
        named = dict(engine.split("=", 1) for engine in engines)
        assert told == {name: urlsplit(url).netloc for name, url in named.items()}


def written(folder: Path, profile: str = "default") -> Path:
    path = folder / "made.env"
    subprocess.run([ROOT / "scripts" / "compose_env", profile, path], check=True)
    return path


def test_secrets_are_made_once_each_their_own_and_for_the_owner_only(tmp_path: Path) -> None:
    path = written(tmp_path, "scale")
    lines = dict(re.findall(r"^([A-Z_]+)=(.*)$", path.read_text("utf-8"), re.MULTILINE))
    assert set(lines) == SECRETS | {"COMPOSE_PROFILES"} and lines["COMPOSE_PROFILES"] == "scale"
    values = {lines[secret] for secret in SECRETS}
    assert len(values) == len(SECRETS) and min(map(len, values)) >= 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = subprocess.run([ROOT / "scripts" / "compose_env", "scale", path], capture_output=True)
    assert again.returncode == 1 and b"there already" in again.stderr
    assert lines["POSTGRES_PASSWORD"] in path.read_text("utf-8")


def test_an_unknown_profile_is_refused(tmp_path: Path) -> None:
    command = [ROOT / "scripts" / "compose_env", "large", tmp_path / "made.env"]
    ended = subprocess.run(command, capture_output=True)
    assert ended.returncode == 2 and not (tmp_path / "made.env").exists()


def compose(*arguments: str) -> "subprocess.CompletedProcess[str]":
    quiet = {k: v for k, v in os.environ.items() if k not in SECRETS | {"COMPOSE_PROFILES"}}
    command = ["docker", "compose", "--file", str(COMPOSE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=quiet, cwd=ROOT)


def has_compose() -> bool:
    return shutil.which("docker") is not None and compose("version").returncode == 0


needs_compose = pytest.mark.skipif(not has_compose(), reason="no docker compose")


@needs_compose
@pytest.mark.parametrize("profile", PROFILES)
def test_compose_itself_accepts_every_profile(profile: str, tmp_path: Path) -> None:
    made = str(written(tmp_path, profile))
    listed = compose("--env-file", made, "config", "--services")
    assert listed.returncode == 0, listed.stderr
    assert set(listed.stdout.split()) == of_profile(profile)


@needs_compose
def test_compose_starts_nothing_without_its_secrets(tmp_path: Path) -> None:
    empty = tmp_path / "empty.env"
    empty.write_text("", "utf-8")
    refused = compose("--env-file", str(empty), "--profile", "default", "config", "--quiet")
    assert refused.returncode != 0 and "run scripts/compose_env" in refused.stderr


def test_the_balancer_keeps_bodies_of_usual_prompts_in_memory() -> None:
    conf = (ROOT / "scripts" / "compose" / "nginx.conf").read_text("utf-8")
    (found,) = re.findall(r"^\s*client_body_buffer_size (\d+)m;", conf, re.M)
    assert int(found) >= 1, "a request's tenant's text is not written to a disk"

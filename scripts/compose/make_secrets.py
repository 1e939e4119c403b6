"""The one-shot service `keys` of docker-compose.yml: secrets as files for the other services.

A secret that the environment has (from `.env`) is taken. Any other is made at the first start and
kept. What was made is printed, with a request: `docker compose logs keys` shows it again. Only the
standard library is imported, and nothing of the tree: this file alone is mounted.

Each folder is a volume, mounted where its secrets are needed and nowhere else.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path("/secrets")
OWNER_ONLY = 0o400
# PostgreSQL's image has a user of its own. Nobody else has this volume.
READABLE = 0o444
EXAMPLE = "scripts/compose/example-request.json"


def secret_of(path: Path, value: str, beginning: str = "", mode: int = OWNER_ONLY) -> str:
    """The secret of this file. It is `value` if that is not empty; else it is made once and
    kept."""
    stored = path.read_text("utf-8") if path.exists() else ""
    secret = value or stored or beginning + secrets.token_hex(32)
    if secret != stored:
        write(path, secret, mode)
    return secret


def write(path: Path, text: str, mode: int) -> None:
    """Write a file whole or not at all, so that a start that is cut off leaves no half of a
    secret."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    new.chmod(mode)  # the process's umask must not change it
    new.rename(path)


def make_all(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Write every secret. Returns the clients' keys by variable; empty where `.env` names one."""

    def from_environment(name: str) -> str:
        return environ.get(name, "")

    secret_of(root / "engine" / "engine_secret", from_environment("HOLDFAST_ENGINE_SECRET"))
    secret_of(root / "gateway" / "master_secret", from_environment("HOLDFAST_MASTER_SECRET"))
    password = secret_of(
        root / "database" / "password", from_environment("POSTGRES_PASSWORD"), mode=READABLE
    )
    url = f"postgresql+psycopg://holdfast:{password}@db:5432/holdfast"
    secret_of(root / "database" / "url", url, mode=READABLE)
    keys = {
        "HOLDFAST_API_KEY": secret_of(
            root / "gateway" / "api_key", from_environment("HOLDFAST_API_KEY"), "hf-"
        ),
        "HOLDFAST_ADMIN_KEY": secret_of(
            root / "gateway" / "admin_key", from_environment("HOLDFAST_ADMIN_KEY"), "hf-admin-"
        ),
    }
    return {name: "" if from_environment(name) else key for name, key in keys.items()}


def summary(keys: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """What to do next. A key that `.env` names is not repeated, because logs are kept."""
    key_texts = {name: key or "(the one in .env)" for name, key in keys.items()}
    gateway = f"http://127.0.0.1:{environ.get('PUBLISHED_GATEWAY_PORT') or 8080}"
    dashboard = f"http://127.0.0.1:{environ.get('PUBLISHED_DASHBOARD_PORT') or 8501}"
    api_key = keys["HOLDFAST_API_KEY"] or "$HOLDFAST_API_KEY"
    return f"""
  API key    {key_texts["HOLDFAST_API_KEY"]}
  admin key  {key_texts["HOLDFAST_ADMIN_KEY"]}
  dashboard  {dashboard}  (sign in with either key)

Once `docker compose ps` says healthy, send this twice. The second answer is read from the cache.
For another model than the demo's, put an id of {gateway}/v1/models into the file.

  curl {gateway}/v1/messages -H "x-api-key: {api_key}" \\
    -H 'anthropic-version: 2023-06-01' -H 'content-type: application/json' -d @{EXAMPLE}
"""


def main() -> int:
    try:
        keys = make_all(ROOT, os.environ)
    except OSError as error:
        print(f"keys: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(summary(keys, os.environ), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

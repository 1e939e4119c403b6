"""The data directory of one `scripts/run`: made, checked, held, and told to others."""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.stack import StartError

LOCK = "run.lock"
SECRETS = "secrets.json"
# A journal, a ledger and logs of some hours.
LEAST_FREE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What `scripts/run` writes into the lock of its data directory."""

    pid: int
    gateway: str
    dashboard: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Values from the environment if it has them, else from a file that the first start makes."""

    api_key: str
    admin_key: str
    engine_secret: str
    master_secret: str


def prepare_data(data: Path) -> Path:
    """Make the data directory, readable by its owner only, and return the one for logs.

    Raises StartError, with what to do, if it can't be written to or has no room.
    """
    logs = data / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        data.chmod(0o700)  # it may have been there
        with (data / LOCK).open("a"):
            pass
        free = shutil.disk_usage(data).free
    except OSError as error:
        blocking = next((part for part in (data, *data.parents) if part.is_file()), None)
        if blocking is not None:
            raise StartError(f"`--data {data}`: {blocking} is a file; name a directory") from error
        why = f"can't be written to ({error.strerror}); name another directory"
        raise StartError(f"`--data {data}` {why}") from error
    if free < LEAST_FREE_BYTES:
        raise StartError(
            f"the disk of `--data {data}` is full: {free / 2**20:.0f} MiB are free and "
            f"{LEAST_FREE_BYTES / 2**20:.0f} needed; free some, or name another --data"
        )
    return logs


@contextmanager
def owning(data: Path, running: Running) -> Iterator[None]:
    """Hold the data directory, and say in its lock who does.

    Raises StartError while another `scripts/run` does, before anything of its is touched. The
    kernel ends the hold of a process that died.
    """
    with (data / LOCK).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = read_running(data)
            whose = f" (process {holder.pid}, {holder.gateway})" if holder else ""
            raise StartError(
                f"`--data {data}` is used by another scripts/run{whose}; "
                "a second one beside it: scripts/run --port 9080"
            ) from None
        file.truncate()
        file.write(json.dumps(asdict(running)))
        file.flush()
        yield


def read_running(data: Path) -> Running | None:
    """What runs in this directory. Its lock says that while somebody holds it."""
    try:
        with (data / LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return Running(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None
    return None


def load_secrets(data: Path, environ: Mapping[str, str]) -> Secrets:
    """Read the secrets of this data directory, or make them; only the owner can read the file.

    Raises StartError where the file is damaged: other secrets would lose what is cached.
    """
    path = data / SECRETS
    if not path.exists():
        fresh = Secrets(
            api_key=f"hf-{secrets.token_urlsafe(32)}",
            admin_key=f"hf-admin-{secrets.token_urlsafe(32)}",
            engine_secret=secrets.token_hex(32),
            master_secret=secrets.token_hex(32),
        )
        whole = path.with_suffix(".new")
        whole.unlink(missing_ok=True)
        with os.fdopen(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(fresh), file, indent=1)
        whole.rename(path)
    stored = read_secrets(data)
    if stored is None:
        raise StartError(f"{path} is damaged; delete it and new keys are made at the next start")
    settings = {key: environ.get(f"HOLDFAST_{key.upper()}") for key in asdict(stored)}
    return Secrets(**{key: settings[key] or value for key, value in asdict(stored).items()})


def read_secrets(data: Path) -> Secrets | None:
    """The stored secrets; None if there are none, or if the file is damaged."""
    try:
        values = json.loads((data / SECRETS).read_text("utf-8"))
        stored = Secrets(**values)
    except (OSError, ValueError, TypeError):
        return None
    is_whole = all(isinstance(value, str) and value for value in values.values())
    return stored if is_whole else None


_SUBJECTS = (
    "a support agent",
    "the night shift",
    "every reviewer",
    "a new colleague",
    "the release manager",
    "an auditor",
    "the person on call",
)
_RULES = (
    "answers the customer in one short paragraph and names the page of the manual that was used",
    "writes down the order number before asking for anything else, and repeats it at the end",
    "never promises a date; the planner is asked first and the answer is copied word for word",
    "checks the last three entries of the log before touching a machine that reported a fault",
    "hands the case over in writing, with what was tried, what is known and what is still open",
    "keeps prices out of the reply unless the customer asked for them in this conversation",
    "closes the ticket only when the customer has said that the answer solved the problem",
    "uses plain words, explains each term once, and links to the glossary for the rest",
)


def handbook(topic: str = "support", num_rules: int = 90, edition: str = "") -> str:
    """Write a handbook. Editions differ from the first words on, so that they share nothing."""
    head = f"Edition {edition}. " if edition else ""
    lines = [f"{head}You work with the {topic} handbook. Answer questions in one sentence.\n"]
    for number in range(1, num_rules + 1):
        subject = _SUBJECTS[number % len(_SUBJECTS)]
        rule = _RULES[(number * 5 + number // 8) % len(_RULES)]
        lines.append(f"{topic.title()} rule {number}: {subject} {rule}.")
    return "\n".join(lines)


def example_request(model: str) -> str:
    """A body of the Messages API as JSON: a marked handbook, and a question behind it."""
    system = {"type": "text", "text": handbook(), "cache_control": {"type": "ephemeral"}}
    body = {
        "model": model,
        "max_tokens": 64,
        "system": [system],
        "messages": [{"role": "user", "content": "What is a lease?"}],
    }
    return json.dumps(body, indent=1, ensure_ascii=False)

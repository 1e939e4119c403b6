"""Workspaces and keys from the command line, on either database."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import pytest

from gateway.cli.main import main


class Gateway(Protocol):
    def __call__(self, *arguments: str, status: int = 0) -> str: ...


@pytest.fixture
def gateway(
    tmp_path: Path,
    shared_database: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Gateway:
    """Runs a command and returns what it wrote, errors after the rest."""
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", shared_database)
    assert main(["migrate"]) == 0

    def run(*arguments: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == status
        output = capsys.readouterr()
        return output.out + output.err

    return run


def test_a_workspace_is_made_limited_listed_archived_and_restored(gateway: Gateway) -> None:
    output = gateway("workspaces", "create", "team-a", "--monthly-spend", "12.5")
    assert output.startswith("team-a active name='team-a'") and "monthly_spend=$12.5" in output
    changed = gateway(
        *("workspaces", "set", "team-a", "--display-name", "Team A"),
        *("--requests-per-minute", "60", "--tokens-per-minute", "40000"),
        *("--max-concurrency", "4", "--lease-share", "0.25", "--monthly-spend", "none"),
        "--may-approximate",
    )
    assert "within 4 seconds" in changed
    assert gateway("workspaces", "list").splitlines() == [
        "team-a active name='Team A' requests_per_minute=60 tokens_per_minute=40000"
        " max_concurrency=4 monthly_spend=none lease_share=0.25 auto_cache=none auto_cache_ttl=none"
        " keep_days=none may_approximate=True"
    ]
    assert "team-a archived" in gateway("workspaces", "archive", "team-a")
    assert "team-a active" in gateway("workspaces", "restore", "team-a")


def test_keys_have_a_scope_an_end_and_a_successor(gateway: Gateway) -> None:
    end = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=0).isoformat()
    key_id, key = gateway(
        *("keys", "create", "--workspace", "w", "--scope", "read_only", "--expires-at", end)
    ).split()
    listed = gateway("keys", "list")
    assert key not in listed
    assert f"{key_id} w unnamed active" in listed
    assert f"read_only expires={end} last_used=none" in listed
    output = gateway("keys", "rotate", key_id, "--grace-seconds", "none")
    new_id, new = output.split()[:2]
    assert f"`{key_id}` works until it is revoked" in output
    assert new.startswith("hf-") and new != key
    rows = gateway("keys", "list", "--workspace", "w").splitlines()
    assert [row.split()[0] for row in rows] == [key_id, new_id]
    assert all(f"read_only expires={end}" in row for row in rows)
    assert "within 4 seconds" in gateway("keys", "revoke", key_id)
    assert f"{key_id} w unnamed revoked" in gateway("keys", "list")


def test_what_can_not_be_is_said(gateway: Gateway) -> None:
    for arguments, words in (
        (["workspaces", "set", "nobody"], "no workspace `nobody`"),
        (["workspaces", "create", "a/b"], "id: must be"),
        (["workspaces", "archive", "default"], "default workspace"),
        (
            ["workspaces", "create", "w2", "--display-name", "a\u202eb"],
            "display_name: must have no",
        ),
        (["keys", "create", "--workspace", "a b"], "workspace: must be"),
        (["keys", "create", "--name", "a\n"], "name: must have no control characters"),
        (["keys", "create", "--name", "a" * 65], "name: must have 1 to 64 characters"),
        (["keys", "rotate", "key_none"], "no active key `key_none`"),
        (["keys", "revoke", "key_none"], "no active key `key_none`"),
    ):
        assert words in gateway(*arguments, status=1)
    output = gateway("keys", "create", "--expires-at", "2020-01-01T00:00:00+00:00", status=2)
    assert "must be in the future" in output
    assert gateway("plan", status=2).startswith("--since: no request of this range")


@pytest.mark.parametrize(
    "arguments",
    [
        ["workspaces", "create", "w", "--requests-per-minute", "0"],
        ["workspaces", "create", "w", "--lease-share", "2"],
        ["workspaces", "create", "w", "--monthly-spend", "0.0000000001"],
        ["keys", "create", "--scope", "root"],
        ["keys", "create", "--expires-at", "2027-01-01"],
        ["keys", "rotate", "key_none", "--grace-seconds", "-1"],
    ],
)
def test_a_bad_value_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert arguments[-2] in capsys.readouterr().err


def test_a_database_that_was_never_made_is_told_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They said that the database is not available."""
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "none"))
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    for command in (["keys", "list"], ["workspaces", "list"], ["export", "--since", "2026-01-01"]):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert error.startswith(
            f"there is no database at `{tmp_path / 'none' / 'ledger.db'}`: run "
        )
        assert not (tmp_path / "none").exists()

"""Batches of several workspaces beside each other, over real sockets."""

from pathlib import Path

import pytest
from anthropic import RateLimitError

from scripts.stack import serving_engine, serving_gateway
from tests.e2e.test_batches import ADMIN, FAST, SLOW, counts_of, ended, row, sdk_at
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually


def test_rows_that_are_refused_for_now_keep_no_other_workspace_out(tmp_path: Path) -> None:
    """One workspace's rows run at five a minute, so its batches last longer than this test."""
    settings = {"HOLDFAST_BATCH_CONCURRENCY": "2"}
    with (
        serving_engine("synthetic", FAST) as engine,
        serving_gateway(tmp_path, [engine.url], settings) as gateway,
    ):
        gateway.wait()
        admin = Admin(gateway.url, ADMIN)
        admin.workspace("limited", requests_per_minute=5)
        admin.workspace("free")
        _, limited_key = admin.make_key("limited")
        _, free_key = admin.make_key("free")
        with sdk_at(gateway.url, limited_key) as limited, sdk_at(gateway.url, free_key) as free:
            many = [row(f"r{number}", f"limited {number % 3}") for number in range(100)]
            first, *_ = [limited.messages.batches.create(requests=many) for _ in range(3)]
            eventually(lambda: counts_of(limited, first).succeeded >= 2)
            few = [row(f"r{number}", "free") for number in range(20)]
            last = ended(free, free.messages.batches.create(requests=few))
            assert last.request_counts.succeeded == 20
            assert counts_of(limited, first).processing > 0
            # The workspace's rows wait for its limit, and none is an error.
            assert counts_of(limited, first).errored == 0


def test_a_batch_too_many_is_refused_in_words_until_another_ends(tmp_path: Path) -> None:
    with (
        serving_engine("synthetic", SLOW) as engine,
        serving_gateway(tmp_path, [engine.url], {"HOLDFAST_TUNING": '{"batches": 3}'}) as gateway,
    ):
        gateway.wait()
        with sdk_at(gateway.url) as sdk:
            rows = [row(f"r{number}", "many", max_tokens=50) for number in range(100)]
            made = [sdk.messages.batches.create(requests=rows) for _ in range(3)]
            with pytest.raises(RateLimitError, match="limit of 3 batches that have not ended"):
                sdk.messages.batches.create(requests=rows)
            # The third waits for the two others, and yet ends at once when it is cancelled.
            sdk.messages.batches.cancel(made[2].id)
            assert ended(sdk, made[2]).request_counts.canceled == 100
            assert counts_of(sdk, made[0]).processing > 0
            sdk.messages.batches.create(requests=rows)

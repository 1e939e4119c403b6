"""What errors of the admin API become in words."""

import pytest

from dashboard.admin.client import AdminClient, ClientError
from tests.dashboard.fake_admin import ADMIN_KEY, serve_fake


def test_a_ledger_that_cannot_be_read_is_no_bare_status() -> None:
    """On a damaged ledger every page said that the gateway answers 529."""
    with serve_fake() as fake:
        fake.status = 529
        with pytest.raises(ClientError, match=r"^The gateway is busy or can't read its database;"):
            AdminClient(fake.url, ADMIN_KEY).get("/admin/v1/usage", dict)
        fake.status = 500
        with pytest.raises(ClientError, match=r"^The gateway answers 500\.$"):
            AdminClient(fake.url, ADMIN_KEY).get("/admin/v1/usage", dict)

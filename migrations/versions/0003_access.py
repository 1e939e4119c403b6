"""Workspaces get names, limits and an archive date.

Keys get scopes, expiry, last use and rotation.
"""

import sqlalchemy as sa
from alembic import op

from gateway.ledger.schema import UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency", "monthly_spend_nano")


def upgrade() -> None:
    # No batch here: a batch may make the table anew, and SQLite refuses that while keys refer to
    # it.
    for column in (
        sa.Column("display_name", sa.String(128), nullable=False, server_default=""),
        sa.Column("archived_at", UtcDateTime(), nullable=True),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in _LIMITS),
        sa.Column("lease_share", sa.Double(), nullable=True),
    ):
        op.add_column("workspaces", column)
    with op.batch_alter_table("api_keys") as keys:
        keys.add_column(
            sa.Column("scope", sa.String(16), nullable=False, server_default="inference")
        )
        keys.add_column(sa.Column("expires_at", UtcDateTime(), nullable=True))
        keys.add_column(sa.Column("last_used_at", UtcDateTime(), nullable=True))
        keys.add_column(sa.Column("replaces", sa.String(32), nullable=True))
        keys.create_unique_constraint("uq_api_keys_replaces", ["replaces"])
    watermarks = op.create_table(
        "watermarks",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_watermarks"),
    )
    op.bulk_insert(watermarks, [{"name": "access", "value": 0}])


def downgrade() -> None:
    """Revoke keys of other scopes, so that they do not become keys that may do more.

    Keys of archived workspaces and keys with an expiry are revoked too.
    """
    op.execute(
        "UPDATE api_keys SET revoked_at = CURRENT_TIMESTAMP WHERE revoked_at IS NULL AND"
        " (scope = 'read_only' OR expires_at IS NOT NULL OR workspace_id IN"
        " (SELECT id FROM workspaces WHERE archived_at IS NOT NULL))"
    )
    op.drop_table("watermarks")
    with op.batch_alter_table("api_keys") as keys:
        keys.drop_constraint("uq_api_keys_replaces", type_="unique")
        for name in ("replaces", "last_used_at", "expires_at", "scope"):
            keys.drop_column(name)
    for name in ("lease_share", *reversed(_LIMITS), "archived_at", "display_name"):
        op.drop_column("workspaces", name)

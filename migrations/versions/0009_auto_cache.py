"""Workspaces and keys: what is held of requests that mark nothing, and for how long."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_TABLES = ("workspaces", "api_keys")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("auto_cache", sa.String(16), nullable=True))
        op.add_column(table, sa.Column("auto_cache_ttl", sa.String(4), nullable=True))


def downgrade() -> None:
    """Columns are dropped in place: a table that others refer to can't be made anew."""
    for table in reversed(_TABLES):
        op.drop_column(table, "auto_cache_ttl")
        op.drop_column(table, "auto_cache")

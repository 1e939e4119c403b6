"""Workspaces and keys: what is held of requests that mark nothing, and for how long."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_TABLES = ("workspaces", "api_keys")


def upgrade() -> None:
    for name in _TABLES:
        with op.batch_alter_table(name) as table:
            table.add_column(sa.Column("auto_cache", sa.String(16), nullable=True))
            table.add_column(sa.Column("auto_cache_ttl", sa.String(4), nullable=True))


def downgrade() -> None:
    for name in reversed(_TABLES):
        with op.batch_alter_table(name) as table:
            table.drop_column("auto_cache_ttl")
            table.drop_column("auto_cache")

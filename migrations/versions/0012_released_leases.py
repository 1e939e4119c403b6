"""Leases that their own workspaces released. Until now operators alone could end one early."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_TABLE = "epoch_reports"
_COLUMN = "released"
# The earlier version adds ends up. To it whatever was ended on purpose was dropped.
_AS_DROPPED = f"UPDATE {_TABLE} SET dropped = dropped + {_COLUMN} WHERE {_COLUMN} > 0"  # noqa: S608
_ADD_TO_DROPPED = """
INSERT INTO lease_ends (width_seconds, start_ms, engine, reason, leases)
SELECT width_seconds, start_ms, engine, 'dropped', leases FROM lease_ends
WHERE reason = 'released'
ON CONFLICT (width_seconds, start_ms, engine, reason)
DO UPDATE SET leases = lease_ends.leases + excluded.leases
"""
_FORGET = "DELETE FROM lease_ends WHERE reason = 'released'"


def upgrade() -> None:
    op.add_column(_TABLE, sa.Column(_COLUMN, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.execute(_AS_DROPPED)
    op.execute(_ADD_TO_DROPPED)
    op.execute(_FORGET)
    op.drop_column(_TABLE, _COLUMN)

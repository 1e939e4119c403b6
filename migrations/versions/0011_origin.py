"""Turns: the HTTP request that a turn came with, and what it was answered."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("http_request_id", sa.String(40)),
    ("user_agent", sa.String(64)),
    ("name", sa.String(64)),
    ("status", sa.BigInteger()),
    ("error", sa.String(300)),
)


def upgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        for name, kind in _COLUMNS:
            turns.add_column(sa.Column(name, kind, nullable=True))
    op.create_index("ix_turns_http_request_id", "turns", ["http_request_id"])


def downgrade() -> None:
    # The checksum of a row is also of the columns that it loses here.
    op.execute("UPDATE turns SET checksum = NULL")
    op.drop_index("ix_turns_http_request_id", "turns")
    with op.batch_alter_table("turns") as turns:
        for name, _ in _COLUMNS:
            turns.drop_column(name)

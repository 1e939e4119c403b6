"""An index of the turns that a sample takes first."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_IS_SAMPLED = "substr(id, 31) = '00'"


def upgrade() -> None:
    where = sa.text(_IS_SAMPLED)
    op.create_index(
        "ix_turns_sampled",
        "turns",
        ["opened_ms", "id"],
        sqlite_where=where,
        postgresql_where=where,
    )


def downgrade() -> None:
    op.drop_index("ix_turns_sampled", "turns")

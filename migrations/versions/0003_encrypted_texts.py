"""Rows of batches and cached contents are encrypted. A gateway seals those of before, at its start:
only it has the master secret. The watermark says that there may be some.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_WATERMARKS = sa.table("watermarks", sa.column("name"), sa.column("value"))


def upgrade() -> None:
    op.bulk_insert(_WATERMARKS, [{"name": "unsealed", "value": 1}])


def downgrade() -> None:
    """What was sealed stays so, and an earlier version can't read it."""
    op.execute(_WATERMARKS.delete().where(_WATERMARKS.c.name == "unsealed"))

"""Rows of batches and cached contents are encrypted.

The watermark says that there may be plain rows. A gateway seals them at its start: only a gateway
has the master secret.
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
    """Sealed rows stay sealed. An earlier version can't read them."""
    op.execute(_WATERMARKS.delete().where(_WATERMARKS.c.name == "unsealed"))

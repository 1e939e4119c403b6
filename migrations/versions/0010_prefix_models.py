"""Whether the sums of a prefix are of several models.

Earlier versions stored one model of each prefix. Where the turns are still there, they tell the
others.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_FILL = """
UPDATE prefixes SET least_model = coalesce(
    (SELECT min(turns.model) FROM turns
     WHERE turns.prefix = prefixes.prefix
       AND coalesce(turns.workspace_id, '') = prefixes.workspace_id),
    model)
"""


def upgrade() -> None:
    op.add_column("prefixes", sa.Column("least_model", sa.String(128), nullable=True))
    op.execute(_FILL)


def downgrade() -> None:
    op.drop_column("prefixes", "least_model")

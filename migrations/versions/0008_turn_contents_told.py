"""Whether a turn's prompt and answer were stored, or why not."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("content", sa.String(16), nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "content")

"""What gateways tell each other of the limits of workspaces."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "shared_limits",
        sa.Column("workspace_id", sa.String(64), primary_key=True),
        sa.Column("state", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("shared_limits")

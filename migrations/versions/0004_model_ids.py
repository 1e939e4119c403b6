"""Which model each id belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "model_ids",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("engine_model", sa.String(256), nullable=False),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_model_ids"),
    )


def downgrade() -> None:
    op.drop_table("model_ids")

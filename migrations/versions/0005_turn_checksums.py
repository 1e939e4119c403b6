"""Each turn has a checksum over what is billed. Earlier rows have none."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("checksum", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "checksum")

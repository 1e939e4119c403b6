"""Each turn's markers, and reasons of misses apart from those of partial reads.

Earlier versions summed the reasons of turns with a read and of turns without one together, as
`miss`. Where the turns are still there, their sums are made anew. Where they are deleted, the sums
are called `mixed`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_WIDTHS = ((0, 86_400), (0, 3600), (0, 60), (1, 86_400), (1, 3600))
"""The intervals, in seconds: of sums over all engines (0) and of sums by engine (1)."""

_CALL_MIXED = """
UPDATE reason_rollups SET kind = 'mixed' WHERE kind = 'miss' AND start_ms < :horizon
"""
_FORGET = """
DELETE FROM reason_rollups WHERE kind IN ('miss', 'part') AND start_ms >= :horizon
"""
_SUM = """
INSERT INTO reason_rollups
    (by_engine, width_seconds, start_ms, workspace_id, engine, model, kind, value, requests)
SELECT {by_engine}, {width}, opened_ms / {step} * {step}, workspace_id, {engine}, model,
    CASE WHEN cache_read_tokens > 0 THEN 'part' ELSE 'miss' END, miss_reason, count(*)
FROM turns WHERE miss_reason IS NOT NULL AND opened_ms >= :horizon
GROUP BY 3, 4, 5, 6, 7, 8
"""
_TOGETHER = """
INSERT INTO reason_rollups
    (by_engine, width_seconds, start_ms, workspace_id, engine, model, kind, value, requests)
SELECT by_engine, width_seconds, start_ms, workspace_id, engine, model, 'miss', value, requests
FROM reason_rollups WHERE kind = 'mixed'
ON CONFLICT (by_engine, width_seconds, start_ms, workspace_id, engine, model, kind, value)
DO UPDATE SET requests = reason_rollups.requests + excluded.requests
"""


def upgrade() -> None:
    op.add_column("turns", sa.Column("marks", sa.JSON(), nullable=True))
    connection = op.get_bind()
    horizon = connection.execute(sa.text("SELECT turns_ms FROM horizon")).scalar_one_or_none()
    values = {"horizon": horizon or 0}
    connection.execute(sa.text(_CALL_MIXED), values)
    connection.execute(sa.text(_FORGET), values)
    for by_engine, width in _WIDTHS:
        statement = _SUM.format(
            by_engine=by_engine,
            width=width,
            step=width * 1000,
            engine="coalesce(engine, '')" if by_engine else "''",
        )
        connection.execute(sa.text(statement), values)


def downgrade() -> None:
    op.execute("DELETE FROM reason_rollups WHERE kind LIKE 'mark%'")
    op.execute(_TOGETHER)
    op.execute("DELETE FROM reason_rollups WHERE kind = 'mixed'")
    op.drop_column("turns", "marks")

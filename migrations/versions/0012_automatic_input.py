"""Sums over turns: the uncached tokens that were reused from memory all the same."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_BANDS = (512_000, 272_000, 256_000, 200_000, 128_000, 100_000, 64_000, 32_000)
_PROMPT = "(input_tokens + cache_read_tokens + cache_write_5m_tokens + cache_write_1h_tokens)"
_WRITTEN = "(cache_write_5m_tokens + cache_write_1h_tokens)"
_CASES = " ".join(f"WHEN {_PROMPT} > {band} THEN {band}" for band in _BANDS)
_SUMS = """
    SELECT opened_ms / {ms} * {ms} AS start_ms, workspace_id, key_id,
        COALESCE(engine, '') AS engine, model,
        CASE WHEN cost_nano IS NOT NULL AND price IS NOT NULL THEN price ELSE '' END AS price,
        CASE {cases} ELSE 0 END AS prompt_above,
        SUM(automatic_tokens - {written}) AS tokens
    FROM turns WHERE automatic_tokens > {written} GROUP BY 1, 2, 3, 4, 5, 6, 7
"""
_UPDATE = sa.text("""
    UPDATE turn_rollups SET automatic_input_tokens = :tokens
    WHERE width_seconds = :width AND start_ms = :start_ms AND workspace_id = :workspace_id
        AND key_id = :key_id AND engine = :engine AND model = :model AND price = :price
        AND prompt_above = :prompt_above
""")


def upgrade() -> None:
    with op.batch_alter_table("turn_rollups") as sums:
        sums.add_column(
            sa.Column("automatic_input_tokens", sa.BigInteger(), nullable=False, server_default="0")
        )
    connection = op.get_bind()
    for width in (3600, 86_400):
        select = _SUMS.format(ms=width * 1000, cases=_CASES, written=_WRITTEN)
        rows = [dict(row) for row in connection.execute(sa.text(select)).mappings()]
        if rows:
            connection.execute(_UPDATE, [{**row, "width": width} for row in rows])


def downgrade() -> None:
    with op.batch_alter_table("turn_rollups") as sums:
        sums.drop_column("automatic_input_tokens")

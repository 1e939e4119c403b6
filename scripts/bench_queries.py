"""Times every query of the dashboard over a month of sample turns, on SQLite and PostgreSQL.

The turns are made up, deterministically: 12 workspaces, two engines, three models, office hours,
coding agents whose prefix grows with every turn beside applications that share a few prefixes.

    python scripts/bench_queries.py --turns 1000000 --sqlite PATH --postgres URL
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gateway.cli import migrate  # noqa: E402
from gateway.ledger import queries_latency, queries_prefixes, queries_turns  # noqa: E402
from gateway.ledger.database import Ledger, sqlite_cursor  # noqa: E402
from gateway.ledger.queries import Queries  # noqa: E402
from gateway.ledger.queries_turns import Cursor, TurnFilter  # noqa: E402
from gateway.ledger.ranges import Range  # noqa: E402
from gateway.ledger.upkeep import rebuild  # noqa: E402
from gateway.pricing import PriceBook, TokenCounts  # noqa: E402
from gateway.settings import DatabaseSettings  # noqa: E402

END = datetime(2026, 11, 21, 12, 20, 30, tzinfo=UTC)
DAYS = 30
LIMIT_MS = 300.0
Query = Callable[[], Awaitable[Any]]

"""``python -m integration_tests.shape``: lower the figures that have become less."""

from __future__ import annotations

import sys

from .figures import FILE, TABLES, faults, in_file, lowered


def main() -> int:
    """Rewrite the file. The exit code is 1 if something is above it."""
    now = {table: count()[0] for table, count in TABLES.items()}
    text = lowered(FILE.read_text(), now)
    FILE.write_text(text)
    said = in_file(text)
    left = [f"{table}: {each}" for table in TABLES for each in faults(now[table], said[table])]
    print(*left, sep="\n", end="\n" if left else "")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

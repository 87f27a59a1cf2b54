"""Whether the settings that a budget chooses are the fastest ones: ``python -m benchmarks.tune``.

``candidates`` lists the settings that are tried for real, ``trained`` trains with one of them,
``choose`` asks `fully_shard(budget=...)`, ``measure`` does both in one cell, and ``regret``
compares.
"""

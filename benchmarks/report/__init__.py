"""RESULTS.md and its pictures, from the JSON files in ``benchmarks/results``."""

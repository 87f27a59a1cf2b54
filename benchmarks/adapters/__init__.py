"""The cost of adapters: one training under Lightning, Accelerate and plain loops, alternating.

``loops`` has a step of each. ``python -m benchmarks.adapters`` alternates between them.
"""

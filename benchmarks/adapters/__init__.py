"""What adapters cost: one training under Lightning, Accelerate and plain loops, in turns.

``loops`` has a step of each, ``python -m benchmarks.adapters`` lets them take turns.
"""

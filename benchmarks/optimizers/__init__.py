"""Benchmarks of the optimizers: loss curves, bytes of state, bytes and time of a step, balance."""

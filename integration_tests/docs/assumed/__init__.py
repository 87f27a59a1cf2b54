"""The names that the documentation's blocks of code take for granted.

A block that uses ``model`` and does not say where it comes from means that of the reader; in tests
it gets one of these. In `plain` it is not sharded yet, in `sharded` it is, `pair` has two halves.
"""

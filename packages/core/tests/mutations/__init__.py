"""Faults put into the sources, each of which named tests have to find.

`engine.toml` and `simulator.toml` have them as data: a behaviour that costs users weeks, in words
that hold for any engine, and the few lines that make ours behave so. ``python3 dev.py mutations``
runs the tests (`runner`). After a change of the engine write the lines anew, not the behaviour.
"""

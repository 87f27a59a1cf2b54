"""Random models, sharded in random ways, against one process that plays all ranks.

A case is drawn from a seed (`drawing`) as frozen data (`cases`). `programs` writes it as a small
Python program: plain modules from `parts`, a function ``shard``, and a list of steps. `runner` runs
this text on ranks, and beside them in one process that has the plain model and plays one rank after
the other; it compares losses, gradients (None with None), norms and weights after each step. What
hangs is ended by a watchdog, with the stacks of all ranks. `minimise` makes a case smaller that
fails. Half of the cases (odd seeds) also have what training scripts of others do (`habits`).

::

    python3 dev.py fuzz                    2,000 cases; those that fail are printed as programs
    python3 dev.py fuzz --only 17          one case
    python3 dev.py fuzz --seed 5000 --cases 300 --ranks 3 --out folder

A program that was printed runs by itself, from the root of the repository:
``PYTHONPATH=packages/core/src python program.py``.

What is not drawn, because the engine refuses it by name or says that it does not do it: double
backwards, copies of a model whose units are unsharded, in-place changes of a unit's input, units
that only some ranks run beside lists of units to prefetch, ``functional_call`` or
``torch.autograd.grad`` by parameters, in a reentrant checkpoint around the root, or several times
in a row.
What is drawn and may be refused is counted apart: an exception in a backward on all ranks, after
units that one of them has left out.
"""

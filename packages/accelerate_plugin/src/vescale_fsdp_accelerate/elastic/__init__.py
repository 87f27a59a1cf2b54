"""Training that goes on when ranks come and go: loaded only if a script asks for it.

* `training`: the context around the loop of a script
* for ``transformers.Trainer``: `callback`, which asks for it, and `loop`
"""

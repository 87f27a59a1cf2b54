"""Ranks in one process, over the engine's pure core: no torch, no store, no sockets.

`world` has what ranks share and when each goes on, `model` is a model of units without parameters
that runs and differentiates itself, `scenarios` draws what users do with it.
"""

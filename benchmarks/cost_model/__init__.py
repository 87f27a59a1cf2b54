"""The computed cost of a step: ``timing`` is the model, ``bytes_by_plan`` its input.

``python -m benchmarks.cost_model.check`` compares it with measured steps on limited networks, and
states its error; ``python -m benchmarks.cost_model.large`` computes figures for 64 to 10,240
GPUs.
"""

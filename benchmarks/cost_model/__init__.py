"""What a step costs, computed: ``timing`` is the model, ``bytes_by_plan`` what goes in.

``python -m benchmarks.cost_model.check`` sets it beside measured steps on limited networks, and
states its error; ``python -m benchmarks.cost_model.large`` computes figures for 64 to 10,240
GPUs.
"""

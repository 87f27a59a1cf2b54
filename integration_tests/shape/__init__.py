"""How large the sources are, what a step runs, and what of others they change: figures that stay.

`figures.toml` has the figures. `lines`, `walk` and `reach` count, and `test_shape` compares.
``python3 dev.py shape`` lowers what has become less.
"""

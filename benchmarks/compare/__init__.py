"""veScale-FSDP, FSDP2, DeepSpeed ZeRO-3 and DDP side by side: ``python -m benchmarks.compare``.

``grid`` lists the cells, ``measure`` alternates between the engines, ``record`` stores results,
``summary`` computes the figures that are shown, ``targets`` compares them with the targets, and
``table`` prints them.
"""

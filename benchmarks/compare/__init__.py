"""veScale-FSDP, FSDP2, DeepSpeed ZeRO-3 and DDP side by side: ``python -m benchmarks.compare``.

``grid`` says what is compared, ``measure`` lets the engines take turns, ``record`` keeps what was
found, ``summary`` says what of it a reader wants, ``targets`` judges it, ``table`` prints it.
"""

"""Numbers of 8 bits in blocks: `codes` of a block, which `blocks` a tensor has and where they lie,
and `batches` of blocks of many tensors, to work on at once.
"""

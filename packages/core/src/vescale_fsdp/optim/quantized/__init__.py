"""Numbers of 8 bits in blocks: `codes` of a block, and `batches` of blocks of many tensors, to work
on at once. Which blocks a tensor has is said in `vescale_fsdp.ragged.blocks`.
"""

"""Element-wise optimizers of ``torch.optim`` on flat pieces of the shards.

`pieces` says what may be joined, `flatten` lets an optimizer step on that, and `space` keeps the
optimizer's states as one flat tensor for each name, which users see cut by parameters.
"""

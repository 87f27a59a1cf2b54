"""Shampoo and SOAP: `base` is what they share, `roots` their linear algebra on plain matrices,
`resting` where preconditioners rest, and `courier` takes gradients there and updates back.
"""

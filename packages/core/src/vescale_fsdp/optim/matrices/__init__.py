"""Whole matrices on owners, for optimizers that need them whole.

`layout` says which matrices a parameter is made of and who holds what of them, `owners` who
computes which, `assignment` both for many parameters, `routes` who sends what to whom, and
`transport` sends it. All but the last are pure integers.
"""

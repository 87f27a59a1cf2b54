"""Muon: the optimizer (`muon`), what it needs to know beforehand (`plan`), its numbers (`rule`,
`newton_schulz`), and the paper's algorithm word for word, to compare with (`literal`).
"""

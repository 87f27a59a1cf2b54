"""Hosts on one machine that die, are cut off and come back, while a small GPT trains on them."""

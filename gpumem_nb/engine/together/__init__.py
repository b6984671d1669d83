"""Rank side: staying together with the other ranks and with the kernel: collectives, votes, signals, signs of life."""

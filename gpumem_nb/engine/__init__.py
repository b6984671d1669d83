"""Rank side: what runs inside every Horovod process."""

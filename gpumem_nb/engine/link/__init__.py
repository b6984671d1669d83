"""Rank side: how ranks reach each other. Horovod is imported here and nowhere else in ``engine/``."""

"""Measurements, each a command of its own: ``python -m tests.bench.prediction``."""

import signal

# A shell without job control starts what it runs in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""Kernel side: the processes. Starting, talking to, watching and stopping ranks; building Horovod."""

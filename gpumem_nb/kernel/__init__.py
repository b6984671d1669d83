"""The notebook's own process: what a session delegates to. Never touches CUDA or Horovod."""

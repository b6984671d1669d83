"""A step without memory: on fake tensors, with the kernels that a GPU would use, in a process of its own."""

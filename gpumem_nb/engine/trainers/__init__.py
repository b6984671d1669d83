"""Trainers that people made with other libraries, taken apart into what a workload is made of."""

# All logic is in .ci/targets.py, which needs nothing but a Python. Variables: TORCH, PYTHON, CHROMIUM, HOROVOD_GPU, LAB_ARGS.
PYTHON ?= python3
export PYTHON TORCH CHROMIUM HOROVOD_GPU LAB_ARGS

.PHONY: help setup lab test test-full demo course course-kit bench matrix soak cuda-build matrix-install lint clean
.DEFAULT_GOAL := help

help setup lab test test-full demo course course-kit bench matrix soak cuda-build matrix-install lint clean:
	@command -v "$(PYTHON)" >/dev/null || { echo "No $(PYTHON) was found: install Python 3.11 or later, or name one with PYTHON=/path/to/python3." >&2; exit 1; }
	@"$(PYTHON)" .ci/targets.py $@

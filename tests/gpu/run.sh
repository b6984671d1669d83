#!/bin/sh
# Everything that needs a real GPU, in four minutes once it is prepared: figures, the tests marked "gpu", records
# (tests/gpu/README.md). What is given to it is passed on to tests/gpu/run.py, such as --seconds 600.
# NCCL_PYTHON=/path/to/python names an environment whose Horovod was built on NCCL, for one rank on NCCL and for several GPUs.
# Needs a Python (PYTHON=python3) with its headers and a CUDA build of torch, that CUDA's toolkit (nvcc), a C++ compiler
# and make, and no root. Without a GPU it changes nothing.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

why_not='
try:
    import torch
except ImportError:
    print("it has no torch")
else:
    if not torch.cuda.is_available():
        print("its torch sees no CUDA GPU" if torch.version.cuda else "its torch is a build for the CPU")
'
reason=$("$python" -B -c "$why_not" 2>/dev/null) || reason="it cannot be run"
if [ -n "$reason" ]; then
    echo "SKIPPED: nothing was tested and nothing was measured on a GPU with $python, because $reason."
    exit 0
fi

export PYTHONPATH="$PWD" PYTHONDONTWRITEBYTECODE=1
case $python in */*) PATH="$(cd "$(dirname "$python")" && pwd):$PATH" ;; esac # its mpiexec, if it has one
prepared=$("$python" tests/gpu/prepare.py)
exec "$prepared" -m tests.gpu.run ${NCCL_PYTHON:+--nccl "$NCCL_PYTHON"} "$@"

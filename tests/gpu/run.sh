#!/bin/sh
# Everything that needs a real GPU: the tests marked "gpu", then figures and records (tests/gpu/README.md).
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
"$prepared" -m pytest -p no:cacheprovider -m gpu tests/gpu
"$prepared" -m tests.gpu.measure
for ranks in 1 4; do
    "$prepared" -m tests.gpu.record --ranks "$ranks"
done

"""Jupyter kernels that tests and the benchmark start themselves."""

from __future__ import annotations

from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner


def kernel_pid(manager: KernelManager) -> int:
    """The process of a kernel on this machine."""
    assert isinstance(manager.provisioner, LocalProvisioner)
    assert manager.provisioner.pid is not None
    return manager.provisioner.pid

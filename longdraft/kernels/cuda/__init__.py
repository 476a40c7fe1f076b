"""Kernels for CUDA devices, written in Triton; its interpreter runs them on the CPU, for tests.

`jit_*` hold what runs on the device, the other modules what launches it. Import only where they are wanted: Triton is
there where PyTorch was installed for CUDA.
"""

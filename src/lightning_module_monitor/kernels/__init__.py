"""From tensors to moments: one contract (:class:`.table.Kernel`), three implementations.

========================  ==========================================================================================
:mod:`.torch_kernel`      any device and dtype, by torch operations; the reference implementation
:mod:`.numba_kernel`      float32, bfloat16 and float16 in host memory, with the extra ``fast``
:mod:`.triton_kernel`     CUDA and ROCm tensors, where Triton works
========================  ==========================================================================================

Internal: it may change in any version.
"""

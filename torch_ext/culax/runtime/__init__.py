"""Kernels from variant to callable: enumerate, compile, build ahead of time, load.

``variants`` names what can be compiled, ``sources`` hashes what it is compiled from, ``compile`` and ``worker``
compile it, ``build`` writes the results with a ``manifest``, ``load`` hands out callables. Importing this package
imports neither the kernel compiler nor tvm_ffi and touches no device.
"""

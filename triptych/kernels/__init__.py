"""The C++ kernels, one shared library without Python's ABI: everything works without it, slower."""

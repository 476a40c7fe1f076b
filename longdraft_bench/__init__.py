"""Benchmarks: kernels and decoding against this machine's measured limits, and against other engines."""

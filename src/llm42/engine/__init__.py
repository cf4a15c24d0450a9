"""The engine: requests, the scheduler that plans passes, the runner that executes them, and the two public front ends.

Imports everything below it (protocol, cache, sampling, kernels, model) and nothing above (receipts, server, cli).
"""

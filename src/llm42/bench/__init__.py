"""Benchmarks: what is run (workloads), how it is timed (throughput), and how it is shown (report).

May import everything below the command line; nothing imports it but the command line.
"""

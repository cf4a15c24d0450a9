"""A model on disk and what is computed from it: configuration, weights, tokenizer, decoder, and getting models.

May import `llm42.errors`, `cache`, `sampling` and `kernels`; never `engine`, `receipts`, `server`, `bench` or `cli`.
"""

"""The server: the OpenAI API over HTTP, with a determinism switch. May import everything but `llm42.cli`.

Invariant: nothing here can change the bits of a request: it translates between JSON and `AsyncLLM`, and whatever a
client sends or fails to send ends in an answer of its own.
"""

"""`python -m llm42` is the command line `llm42`."""

from __future__ import annotations

from llm42.cli import main

if __name__ == "__main__":
    main()

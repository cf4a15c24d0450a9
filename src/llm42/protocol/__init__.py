"""The protocol: what is a candidate, what is committed, and when a window is verified.

Owns the semantics and nothing else: pure Python, no tensors, no scheduling, no memory. It imports nothing from this
package, so that it can be read and tested without a model and reused by another engine.
"""

from llm42.protocol.grouping import GroupingPolicy, WindowState
from llm42.protocol.ledger import Ledger
from llm42.protocol.shape_class import ShapeClass
from llm42.protocol.verdict import Verdict, judge

__all__ = ["GroupingPolicy", "Ledger", "ShapeClass", "Verdict", "WindowState", "judge"]

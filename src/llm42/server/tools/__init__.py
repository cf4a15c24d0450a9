"""Tool calls: what a request may say about them, how a model is told, and how its calls are found in its answer.

Owns the formats of the model families and the shape of OpenAI's tools; knows nothing of HTTP or of the engine, and may
import nothing but the tokenizer's type from outside.
"""

from llm42.server.tools.deltas import CallIds, ContentDelta, Delta, ToolCall, ToolCallDelta, call_ids, collect
from llm42.server.tools.families import PARSERS, knows_tools, needs_special_tokens, parser_name_for
from llm42.server.tools.forced import ForcedToolParser, forced_schema, strict_structural_tag
from llm42.server.tools.messages import demands_short_ids, describe_tools, messages_for_template, template_arguments
from llm42.server.tools.parser import ToolParser
from llm42.server.tools.request import Tool, ToolOptions, parse_tools

__all__ = [
    "PARSERS",
    "CallIds",
    "ContentDelta",
    "Delta",
    "ForcedToolParser",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolOptions",
    "ToolParser",
    "call_ids",
    "collect",
    "demands_short_ids",
    "describe_tools",
    "forced_schema",
    "knows_tools",
    "messages_for_template",
    "needs_special_tokens",
    "parse_tools",
    "parser_name_for",
    "strict_structural_tag",
    "template_arguments",
]

"""How much one constraint may cost, from its source to its masks; nothing else."""

from __future__ import annotations

from llguidance import LLParserLimits
from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of one compile and of what it leaves behind. Sizes in bytes, times in seconds."""

    source_bytes: int = 256 << 10
    depth: int = 64  # of nested schemas, groups, parentheses
    schema_nodes: int = 20_000  # schemas inside a schema
    optional_properties: int = 500  # of one object: each one is a live item of the parser
    alternatives: int = 20_000  # of one enum or choice
    compile_seconds: float = 5.0  # of processor time
    compile_memory: int = 512 << 20  # beyond what the compiling process holds at rest
    grammar_memory: int = 128 << 20  # of one grammar, with the masks of its search
    check_seconds: float = 5.0  # judging a finished text; of processor time
    patience: float = 6.0  # times as long by the clock: who is refused must not depend on what else the machine does
    search_nodes: int = 300  # matcher states looked at for a shortest completion
    lexer_states: int = 150_000  # up to 250 bytes each, kept as long as the grammar


def parser_limits(limits: Limits) -> LLParserLimits:
    """The library's own limits. Its errors carry no parser state: users see them."""
    return LLParserLimits(max_lexer_states=limits.lexer_states, verbose_errors=False)

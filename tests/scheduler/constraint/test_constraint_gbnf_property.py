"""Random regular grammars, written as EBNF and as Python regular expressions, accept the same texts."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import accepts, build

Both = tuple[str, str]  # the same language in EBNF and as a regular expression

LEAVES: st.SearchStrategy[Both] = st.sampled_from(
    [('"a"', "a"), ('"b"', "b"), ('"ab"', "ab"), ("[ab]", "[ab]"), ("[^a]", "[^a]"), ('"中"', "中"), ("[b中]", "[b中]")]
)
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{1,}"])


def _grow(inner: st.SearchStrategy[Both]) -> st.SearchStrategy[Both]:
    sequence = st.lists(inner, min_size=2, max_size=3).map(
        lambda parts: (" ".join(f"({p[0]})" for p in parts), "".join(f"(?:{p[1]})" for p in parts))
    )
    choice = st.lists(inner, min_size=2, max_size=3).map(
        lambda parts: (" | ".join(p[0] for p in parts), "|".join(f"(?:{p[1]})" for p in parts))
    )
    repeat = st.tuples(inner, COUNTS).map(lambda pair: (f"({pair[0][0]}){pair[1]}", f"(?:{pair[0][1]}){pair[1]}"))
    return sequence | choice | repeat


LANGUAGES = st.recursive(LEAVES, _grow, max_leaves=6)
WORDS = ["".join(word) for length in range(5) for word in itertools.product("ab中", repeat=length)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(language=LANGUAGES, split=st.booleans())
def test_regular_grammars_equal_regular_expressions(language: Both, split: bool) -> None:
    ebnf, pattern = language
    source = f"root ::= part\npart ::= {ebnf}" if split else f"root ::= {ebnf}"
    matcher = build("ebnf", source)
    judge = re.compile(f"(?:{pattern})", re.DOTALL)
    for word in WORDS:
        assert accepts(matcher, word) == (judge.fullmatch(word) is not None), (source, pattern, word)

"""The compiler: once for equal sources, bounded in memory, never stopped by a hostile source."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.hostile_inputs import HOSTILE
from radixfleet.models import resolve
from services.scheduler.constraint.compiler import Compiler
from services.scheduler.constraint.errors import CompilerBusy, ConstraintError
from services.scheduler.constraint.grammar import GrammarCache
from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.masks import MaskFiller, RowJob
from services.scheduler.constraint.process import CompileProcess, ProcessGone
from services.scheduler.constraint.protocol import CompileJob
from shared.messages.request import Constraint

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import token_order, vocabulary

SMALL = Constraint("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
WRONG = ("a wrong type", "a wrong type of a pattern", "two constraints at once")  # the door's to refuse
SOURCES = [
    Constraint(kind, source if isinstance(source, str) else json.dumps(source))
    for name, params in HOSTILE
    if name not in WRONG
    for kind, source in params.items()
] + [
    Constraint("regex", "\ud800"),
    Constraint("structural_tag", json.dumps({"format": {"type": "nope", "x": ["y"] * 1000}})),
]
ENDLESS = "start: " + " | ".join(f'a "{i}"' for i in range(100_000)) + '\na: "x"'
SLOW = "start: " + " | ".join(f'a "{i}"' for i in range(15_000)) + '\na: "x"'


async def start(limits: Limits | None = None, **options: Any) -> Compiler:
    """Over tokens that are read once for all tests."""
    return await Compiler.start(str(resolve(None)), limits, order=token_order(), **options)


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[Compiler]:
    compiler = await start(Limits(compile_seconds=20))
    yield compiler
    await compiler.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_compiler() -> AsyncIterator[Compiler]:
    """For tests that leave nothing behind; it reads the tokens by itself."""
    compiler = await Compiler.start(str(resolve(None)))
    yield compiler
    await compiler.close()


async def test_equal_sources_compile_once_however_many_ask(compiler: Compiler) -> None:
    spaced = Constraint("json_schema", json.dumps(json.loads(SMALL.source), indent=4, sort_keys=True))
    waiting = [compiler.compile(SMALL if i % 2 else spaced) for i in range(50)]
    grammars = await asyncio.gather(*waiting)
    assert len({id(grammar) for grammar in grammars}) == 1
    assert compiler.stats.compiled == 1
    assert await compiler.compile(spaced) is grammars[0]
    assert compiler.stats.hits == 1
    other = await compiler.compile(Constraint("json_schema", SMALL.source, any_whitespace=True))
    assert other is not grammars[0]


async def test_a_compiled_grammar_fills_masks(compiler: Compiler) -> None:
    grammar = await compiler.compile(Constraint("regex", "[0-9]{3}"))
    assert grammar.minimum is not None
    filler = MaskFiller(compiler.vocabulary.words)
    future = filler.submit([RowJob(grammar.state(10), budget=10)])
    filled = await asyncio.wrap_future(future)
    assert not filled.outcomes[0].error
    filler.close()


async def test_refusals_name_the_field_and_are_remembered(compiler: Compiler) -> None:
    for _ in range(3):
        with pytest.raises(ConstraintError) as caught:
            await compiler.compile(Constraint("regex", "ab(?=c)"))
        assert str(caught.value) == "regex: column 3: look-around (?=...) is not supported"
    assert compiler.stats.refused == 1
    with pytest.raises(ConstraintError, match="json_schema: line 1, column 2: not JSON"):
        await compiler.compile(Constraint("json_schema", "{"))
    with pytest.raises(ConstraintError, match="regex: 300000 bytes are more than"):
        await compiler.compile(Constraint("regex", "a" * 300_000))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "source",
    [
        Constraint("xml_schema", '{"a":"[<]"}'),
        Constraint("json_schema", '{"type":"object","properties":{"a":{"$ref":"#/properties/a"}},"required":["a"]}'),
    ],
)
async def test_what_leads_nowhere_after_its_forced_beginning_is_refused(
    shared_compiler: Compiler, source: Constraint
) -> None:
    with pytest.raises(ConstraintError, match="no text satisfies it"):
        await shared_compiler.compile(source)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("schema", ['{"$ref":"#"}', '{"allOf":[{"const":1},{"const":2}]}'])
async def test_what_no_text_satisfies_is_refused(shared_compiler: Compiler, schema: str) -> None:
    with pytest.raises(ConstraintError):
        await shared_compiler.compile(Constraint("json_schema", schema))


async def test_what_breaks_in_the_middle_of_a_text_is_refused_before(compiler: Compiler) -> None:
    with pytest.raises(ConstraintError, match="regex: the grammar is too complex: lexer error: too many expressions"):
        await compiler.compile(Constraint("regex", "((x{1,50}){1,50}){1,50}"))
    with pytest.raises(ConstraintError, match="lark: the grammar is too complex: Parser Error: Current row has"):
        await compiler.compile(Constraint("lark", SLOW))


@pytest.mark.asyncio(loop_scope="module")
async def test_large_sources_have_the_same_canonical_form(shared_compiler: Compiler) -> None:
    """They are read in another process; layout and the order of keywords count as little as in small ones."""
    schema = {"type": "object", "properties": {f"name{i}": {"type": "integer", "minimum": i} for i in range(400)}}
    compact, spaced = json.dumps(schema), json.dumps(dict(reversed(schema.items())), indent=2)
    assert len(compact) > 16_000
    one, other = await asyncio.gather(
        *(shared_compiler.compile(Constraint("json_schema", text)) for text in (compact, spaced))
    )
    assert one is other
    for bad, reason in (
        ("[" * 20_000, "nested too deeply"),
        ('{"a":' + " " * 20_000, "line 1, column 20006: not JSON"),
    ):
        with pytest.raises(ConstraintError, match=reason):
            await shared_compiler.compile(Constraint("json_schema", bad))


async def test_the_cache_is_bounded_by_bytes() -> None:
    compiler = await start(cache_bytes=20 << 20)
    for i in range(40):
        await compiler.compile(Constraint("regex", f"[a-z]{{{i + 1}}}"))
        assert compiler.cache.bytes <= 20 << 20
    assert 0 < len(compiler.cache) <= 20
    assert compiler.stats.compiled == 40
    await compiler.compile(Constraint("regex", "[a-z]{40}"))
    assert compiler.stats.compiled == 40
    await compiler.compile(Constraint("regex", "[a-z]{1}"))
    assert compiler.stats.compiled == 41
    await compiler.close()


def test_the_least_recently_used_grammar_goes_first() -> None:
    class Sized:
        def __init__(self, size: int) -> None:
            self.size = size

    cache = GrammarCache(100)
    items: list[Any] = [Sized(40), Sized(40), Sized(40), Sized(101)]
    cache.put(b"a", items[0])
    cache.put(b"b", items[1])
    assert cache.get(b"a") is items[0]
    cache.put(b"c", items[2])
    assert cache.get(b"b") is None
    assert cache.get(b"a") is items[0]
    cache.put(b"d", items[3])
    assert cache.get(b"d") is None
    assert (len(cache), cache.bytes) == (2, 80)
    cache.put(b"a", items[1])
    assert cache.bytes == 80
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


async def test_a_killed_process_costs_one_request_and_is_replaced(compiler: Compiler) -> None:
    slow = asyncio.create_task(compiler.compile(Constraint("lark", SLOW)))
    process = await _busy_process(compiler)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ConstraintError, match="too much memory"):
        await slow
    assert (await compiler.compile(SMALL)).minimum is not None
    assert compiler.stats.killed == 1


async def test_others_do_not_wait_for_a_slow_one() -> None:
    limits = Limits(compile_seconds=120.0, source_bytes=4 << 20)
    compiler = await start(limits, processes=2)
    slow = asyncio.create_task(compiler.compile(Constraint("lark", ENDLESS)))
    await _busy_process(compiler)
    assert (await compiler.compile(Constraint("regex", "[a-f]+"))).minimum == 1
    assert not slow.done()
    await compiler.close()
    with pytest.raises(asyncio.CancelledError):
        await slow


async def test_time_is_bounded() -> None:
    compiler = await start(Limits(compile_seconds=1.0, source_bytes=4 << 20))
    slow = asyncio.create_task(compiler.compile(Constraint("lark", ENDLESS)))
    killed = await _busy_process(compiler)
    with pytest.raises(ConstraintError, match="takes more than 1 seconds"):
        await slow
    assert not killed.alive
    with pytest.raises(ConstraintError, match="takes more than 1 seconds"):
        await compiler.compile(Constraint("lark", ENDLESS))
    assert compiler.stats.killed == 1  # it is remembered for a while
    await compiler.close()


async def test_the_processors_time_is_what_counts() -> None:
    """On a machine that is busy elsewhere a small constraint may take long by the clock."""
    limits = Limits(compile_seconds=0.2, patience=500.0, source_bytes=4 << 20)
    compiler = await start(limits)
    [process] = compiler._pool._idle
    os.kill(process.pid, signal.SIGSTOP)
    small = asyncio.create_task(compiler.compile(Constraint("regex", "[a-f]+")))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(small), 0.5)
    os.kill(process.pid, signal.SIGCONT)
    assert (await small).minimum == 1
    with pytest.raises(ConstraintError, match=r"takes more than 0\.2 seconds"):
        await compiler.compile(Constraint("lark", ENDLESS))
    assert not process.alive
    await compiler.close()


async def test_memory_is_bounded() -> None:
    limits = Limits(compile_memory=16 << 20, compile_seconds=60, source_bytes=4 << 20)
    compiler = await start(limits)
    with pytest.raises(ConstraintError, match="memory"):
        await compiler.compile(Constraint("lark", ENDLESS))
    assert (await compiler.compile(SMALL)).minimum is not None
    await compiler.close()


async def test_a_process_ends_with_its_parent_even_in_the_middle_of_a_job() -> None:
    process = await CompileProcess.start(str(resolve(None)), Limits())
    job = asyncio.create_task(process.ask(CompileJob("lark", SLOW, False, False), 60.0))
    while not process.jobs:
        await asyncio.sleep(0)
    process._writer.write_eof()
    with pytest.raises(ProcessGone):
        await job
    assert process._inner.returncode == 0


async def test_who_goes_away_leaves_the_others_waiting(compiler: Compiler) -> None:
    constraint = Constraint("lark", SLOW)
    first = asyncio.create_task(compiler.compile(constraint))
    second = asyncio.create_task(compiler.compile(constraint))
    await _busy_process(compiler)
    first.cancel()
    with pytest.raises(ConstraintError, match="too complex"):
        await second
    third = asyncio.create_task(compiler.compile(Constraint("lark", "// other\n" + SLOW)))
    process = await _busy_process(compiler)
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    while process.alive:
        await asyncio.sleep(0)
    assert (await compiler.compile(SMALL)).minimum is not None


async def test_a_full_queue_is_busy() -> None:
    compiler = await start(processes=1, most_waiting=2)
    tasks = [asyncio.create_task(compiler.compile(Constraint("regex", f"a{{{i + 1}}}"))) for i in range(3)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results if isinstance(result, Exception)] == [CompilerBusy]
    await compiler.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_best_effort_is_judged_afterwards(shared_compiler: Compiler) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    with pytest.raises(ConstraintError, match="#/uniqueItems: uniqueItems cannot be enforced"):
        await shared_compiler.compile(Constraint("json_schema", schema))
    lenient = Constraint("json_schema", schema, best_effort=True)
    await shared_compiler.compile(lenient)
    good, bad, broken = [await shared_compiler.check(lenient, text) for text in ("[1,2]", "[1,1]", "[1,")]
    assert good.valid
    assert not bad.valid
    assert "non-unique" in bad.reason
    assert not broken.valid
    assert (await shared_compiler.check(Constraint("regex", "a+b"), "aab")).valid
    assert "not allowed after" in (await shared_compiler.check(Constraint("regex", "a+b"), "aac")).reason


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("schema", "text", "valid", "known"),
    [
        ({"type": "string", "format": "time"}, '"10:10:10Z"', True, True),
        ({"type": "string", "format": "json-pointer"}, '"x"', False, False),
        ({"type": "string", "format": "regex"}, '"["', False, True),
        ({"items": [{"type": "integer"}], "uniqueItems": True}, '[1,"a"]', True, True),
        ({"items": [{"type": "integer"}], "uniqueItems": True}, '["a"]', False, True),
        ({"minProperties": 2}, '{"a":1,"a":2}', False, True),
        ({"dependentRequired": {"title": ["a"]}}, '{"title":1}', False, True),
    ],
)
async def test_a_verdict_says_what_it_knows(
    shared_compiler: Compiler, schema: Any, text: str, valid: bool, known: bool
) -> None:
    verdict = await shared_compiler.check(Constraint("json_schema", json.dumps(schema), best_effort=True), text)
    assert (verdict.valid, verdict.known) == (valid, known), verdict.reason


async def test_a_check_that_never_ends_is_given_up() -> None:
    compiler = await start(Limits(check_seconds=1.0))
    schema = json.dumps({"type": "string", "pattern": "^(a+)+$"})
    verdict = await compiler.check(Constraint("json_schema", schema), json.dumps("a" * 60 + "!"))
    assert not verdict.known
    assert (await compiler.compile(SMALL)).minimum is not None
    await compiler.close()


async def test_closing_ends_the_processes() -> None:
    compiler = await start()
    await compiler.compile(SMALL)
    slow = asyncio.create_task(compiler.compile(Constraint("lark", SLOW)))
    process = await _busy_process(compiler)
    await compiler.close()
    assert not process.alive
    with pytest.raises(asyncio.CancelledError):
        await slow


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("constraint", SOURCES, ids=[f"{c.kind}: {c.source[:40]!r}" for c in SOURCES])
async def test_hostile_sources_are_answered(constraint: Constraint, shared_compiler: Compiler) -> None:
    """Refused with a reason, or compiled and usable."""
    grammar, refusal = None, None
    try:
        grammar = await shared_compiler.compile(constraint)
    except ConstraintError as error:
        refusal = error
    if grammar is None:
        assert refusal is not None
        assert refusal.kind == constraint.kind
        assert refusal.reason
        assert len(str(refusal)) < 1000
    else:
        filler = MaskFiller(vocabulary().words)
        filled = await asyncio.wrap_future(filler.submit([RowJob(grammar.state(50), budget=50)]))
        assert not filled.outcomes[0].error
        filler.close()
    assert (await shared_compiler.compile(SMALL)).minimum is not None


async def _busy_process(compiler: Compiler) -> Any:
    """The process that works on a job; waits until one does."""
    while not compiler._pool._busy:
        await asyncio.sleep(0)
    return next(iter(compiler._pool._busy))

"""`@function`: a Python function over a state, and the ways to run it.

Leaves one run's execution to execution, many of them to batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from radixfleet.backend.sampling import Sampling, bias_items, texts
from radixfleet.lang import batch, compiled, execution
from radixfleet.lang.compiled import CompiledProgram
from radixfleet.lang.defaults import backend_or_default
from radixfleet.lang.execution import Settings
from radixfleet.lang.graph import Graph
from radixfleet.lang.optimizations import Optimizations
from radixfleet.lang.state import ProgramState
from radixfleet.lang.tracer import TracedState

Function = Callable[..., Any]


class Program:
    """A function whose first parameter is `s`. Calling it runs it; inside another program, give that one's state."""

    def __init__(
        self, function: Function, bound: Mapping[str, Any] | None = None, num_api_spec_tokens: int | None = None
    ) -> None:
        names = list(inspect.signature(function).parameters)
        if not names or names[0] != "s":
            raise TypeError(f"the first parameter of {function.__name__} must be s, the program's state")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__name__} yields, so calling it would run nothing; a program only returns")
        functools.update_wrapper(self, function)
        self.function = function
        self.arg_names = names[1:]
        self.bound = dict(bound or {})
        self.num_api_spec_tokens = num_api_spec_tokens or 0

    def bind(self, **arguments: Any) -> Program:
        """The same program with some arguments given already."""
        return Program(self.function, {**self.bound, **arguments}, self.num_api_spec_tokens)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ProgramState | TracedState):
            return self.function(*args, **{**self.bound, **kwargs})
        return self.run(*args, **kwargs)

    def run(
        self,
        *args: Any,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        logit_bias: Mapping[Any, float] | None = None,
        optimize: Optimizations | bool | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program and return its state. Raises whatever goes wrong in it.

        Sampling wishes hold wherever a gen() has none of its own. Arguments that are no parameters of the function
        become the values of the gen()s with their names. With `stream` the state comes back at once, for text_iter.
        `optimize=False` switches every optimisation off.
        """
        sampling = _sampling(locals())
        settings = Settings(backend_or_default(backend), sampling, stream, not use_thread, optimizations(optimize))
        return execution.run(self, settings, args, kwargs)

    async def run_async(self, *args: Any, **kwargs: Any) -> ProgramState:
        """run() for an event loop: awaits the finished state. Cancelling it ends the program."""
        settings, arguments = self._split_settings(kwargs)
        return await execution.run_async(self, settings, args, arguments)

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        optimize: Optimizations | bool | None = None,
        on_error: Literal["raise", "keep"] = "raise",
        **wishes: Any,
    ) -> Any:
        """Run the program for each item (a mapping of arguments, or a tuple of them); states in the same order.

        `wishes` are the sampling wishes of run(): max_new_tokens, temperature, stop, seed and so on.
        All items finish. Then BatchError tells of those that failed; with `on_error="keep"` their states raise when
        read. `generator_style` yields states as soon as they and all before them are done.
        """
        unknown = ", ".join(sorted(wishes.keys() - _WISHES.keys()))
        if unknown:
            raise TypeError(f"run_batch() got unexpected keyword arguments: {unknown}")
        sampling = _sampling({**_WISHES, **wishes})
        settings = Settings(backend_or_default(backend), sampling, options=optimizations(optimize))
        items = batch.arguments_of(self, batch_kwargs)
        keep = on_error == "keep"
        states = batch.run(
            self, settings, items, num_threads, progress_bar=progress_bar, keep=keep, lazy=generator_style
        )
        return states if generator_style else list(states)

    def trace(self, backend: Any = None, **given: Any) -> Graph:
        """What the program would append, as a graph; arguments that are not given stay open. No backend is asked."""
        return compiled.graph_of(self, given, Sampling(temperature=1.0))

    def compile(
        self,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
        optimize: Optimizations | bool | None = None,
        **given: Any,
    ) -> CompiledProgram:
        """The program with its graph and what can be done with it; the function's own code runs once for that.

        Arguments that are given count as constants. `temperature` and `seed` are those of the later runs.
        """
        options = optimizations(optimize)
        sampling = Sampling(temperature=temperature, sampling_seed=seed)
        graph = compiled.graph_of(self, given, sampling, merge=options.merge)
        return CompiledProgram(self, graph, options, given)

    def explain(self, **given: Any) -> None:
        """Print the graph and what each optimisation finds in it; the arguments are those of compile()."""
        self.compile(**given).explain()

    def cache(self, backend: Any = None, **given: Any) -> bool:
        """Compute and cache the constant prefix now. False if it is too short to be worth it."""
        return compiled.compute_prefix(self.trace(**given), backend_or_default(backend))

    def _split_settings(self, kwargs: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
        """run()'s own keywords, its defaults applied, and the program's arguments."""
        own = {name: kwargs.get(name, default) for name, default in _RUN_DEFAULTS.items()}
        if own["stream"]:
            raise ValueError("run_async() returns finished states; for text as it comes use run(stream=True)")
        settings = Settings(
            backend_or_default(own["backend"]),
            _sampling(own),
            inline=not own["use_thread"],
            options=optimizations(own["optimize"]),
        )
        return settings, {name: value for name, value in kwargs.items() if name not in own}


_RUN_DEFAULTS = {
    parameter.name: parameter.default
    for parameter in inspect.signature(Program.run).parameters.values()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
_WISHES = {
    name: default
    for name, default in _RUN_DEFAULTS.items()
    if name not in ("stream", "backend", "use_thread", "optimize")
}


@overload
def function(func: Function, num_api_spec_tokens: int | None = None) -> Program: ...
@overload
def function(func: None = None, num_api_spec_tokens: int | None = None) -> Callable[[Function], Program]: ...
def function(func: Function | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is `s`.

    With `num_api_spec_tokens`, on an API without scripts such as OpenAI's, a generation asks for so many tokens and the
    generations after it in the same turn take their values from them, as long as the program's own text stands between.
    """
    if func is None:
        return lambda later: Program(later, num_api_spec_tokens=num_api_spec_tokens)
    return Program(func, num_api_spec_tokens=num_api_spec_tokens)


def optimizations(wish: Optimizations | bool | None) -> Optimizations:
    if isinstance(wish, Optimizations):
        return wish
    return Optimizations.none() if wish is False else Optimizations()


def _sampling(said: Mapping[str, Any]) -> Sampling:
    """The run's defaults for every generation."""
    return Sampling(
        max_new_tokens=said["max_new_tokens"],
        n=said["n"],
        stop=texts(said["stop"]),
        stop_token_ids=None if said["stop_token_ids"] is None else tuple(said["stop_token_ids"]),
        stop_regex=texts(said["stop_regex"]),
        temperature=said["temperature"],
        top_p=said["top_p"],
        top_k=said["top_k"],
        min_p=said["min_p"],
        frequency_penalty=said["frequency_penalty"],
        presence_penalty=said["presence_penalty"],
        repetition_penalty=said["repetition_penalty"],
        ignore_eos=said["ignore_eos"],
        sampling_seed=said["seed"],
        logit_bias=bias_items(said["logit_bias"]),
        return_logprob=said["return_logprob"],
        logprob_start_len=said["logprob_start_len"],
        top_logprobs_num=said["top_logprobs_num"],
        return_text_in_logprobs=said["return_text_in_logprobs"],
    )

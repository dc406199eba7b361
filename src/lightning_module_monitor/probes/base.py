"""Parts that probes share: the watched sites, the gate, reports of errors, the tools of a step, and its phases."""

from __future__ import annotations

import logging
import textwrap
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from lightning_module_monitor.errors import Log, MonitorError, shortened
from lightning_module_monitor.model.hooks import is_in_backward
from lightning_module_monitor.model.names import ModelIndex, ModuleSite, ParameterSite
from lightning_module_monitor.model.outputs import Path, is_first
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.step.accumulator import StepAccumulator

SiteT = TypeVar("SiteT", ModuleSite, ParameterSite)

MAX_MESSAGE = 300
"""Characters of an error's message in a message of the monitor."""


@dataclass(frozen=True)
class Watched(Generic[SiteT]):
    """A module or parameter, and what is recorded of it, by kind."""

    site: SiteT
    streams: Mapping[str, Stream]
    layers: Mapping[str, Mapping[str, Stream]] = field(default_factory=dict)
    """Streams of the linear maps of a module, by kind and by the name of the map's site."""

    def all_streams(self) -> list[Stream]:
        """The streams of every kind, linear maps included."""
        return [*self.streams.values(), *(stream for by_site in self.layers.values() for stream in by_site.values())]


WatchedModule = Watched[ModuleSite]
WatchedParameter = Watched[ParameterSite]
Selected = Collection[int] | None
"""Some of the parameters, by their ``id``; ``None`` for all."""


class Gate:
    """Whether what happens now is observed, and by which step: one for all steps of a module, which hooks read."""

    def __init__(self) -> None:
        self.observer: object = None
        """The accumulator that takes what happens now: the current one, or ``None`` while the gate is closed. Hooks read it."""
        self.wrapped: nn.Module | None = None
        """The monitored module, if a strategy has wrapped it."""
        self.may_be_captured = False
        """Whether CUDA is in use, so that a stream may be captured. Asked once a step: nothing else pays for it where there is no CUDA."""
        self.is_in_step: Callable[[], bool] | None = None
        """Whether the step itself runs, and not code of others around it; ``None`` where all code counts."""
        self._current: object = None
        self._closed_by: set[object] = set()

    @property
    def current(self) -> object:
        """The accumulator of the step that runs, or of the loop of another stage that has suspended it; ``None`` without either."""
        return self._current

    @current.setter
    def current(self, accumulator: object) -> None:
        self._current = accumulator
        self._set_observer()

    def _set_observer(self) -> None:
        self.observer = None if self._closed_by else self._current

    def is_of_others(self) -> bool:
        """Whether the code that runs is not the step's. A call within a backward pass is the repetition of one that was the step's."""
        return self.is_in_step is not None and not self.is_in_step() and not is_in_backward()

    @property
    def observer_of_calls(self) -> object:
        """The accumulator that takes calls of modules: the current one, or ``None`` while the gate is closed or other code runs."""
        return None if self.is_of_others() else self.observer

    def close(self, by: object) -> None:
        """Nothing is observed from now on, until :meth:`open` is called with the same object. A second call does nothing."""
        self._closed_by.add(by)
        self._set_observer()

    def open(self, by: object) -> None:
        """Observe again, unless the gate is closed by another object."""
        self._closed_by.discard(by)
        self._set_observer()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within the block nothing is observed."""
        by = object()
        try:
            self.close(by)
            yield
        finally:
            self.open(by)

    def is_redirected(self, module: nn.Module) -> bool:
        """Whether a call of a module that begins now is the wrapper's: Lightning has replaced ``forward`` by the step for this call.

        What it takes and returns is the step's, and no activation. Calls within it are the module's own.
        """
        # Lightning's own name for the replacement: strategies/strategy.py, _ForwardRedirection.
        return module is self.wrapped and getattr(module.__dict__.get("forward"), "__name__", "") == "wrapped_forward"


def unchanged_grad_mode() -> AbstractContextManager[None]:
    """After the block the grad mode is as before. Around guards: Ctrl-C may come when one is about to restore it."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


@contextmanager
def failing_alone(report: Callable[[Exception], None]) -> Iterator[None]:
    """Give an error of the block to ``report`` and go on behind it. A ``MonitorError`` is raised: errors are to be raised then."""
    try:
        yield
    except MonitorError:
        raise
    except Exception as error:
        report(error)


class ErrorReporter:
    """Reports everything once for each model, in all its runs. With ``warn`` no error of the monitor ends a run.

    Args:
        logger: Receives the messages.
        on_error: ``warn``: an error is logged and counted. ``raise``: it is raised as a ``MonitorError``.
        is_first: Whether this is the process, of several with the same message, that logs it.
    """

    def __init__(self, logger: Log, on_error: str, is_first: Callable[[], bool]) -> None:
        self._logger = logger
        self._raises = on_error == "raise"
        self.is_first = is_first
        self._reported: set[str] = set()
        self._model: weakref.ref[nn.Module] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None}

    def begin(self, model: nn.Module) -> None:
        """A model is about to be observed. If it is not the same as before, everything may be reported again."""
        if self._model is None or self._model() is not model:
            self._reported.clear()
            self._model = weakref.ref(model)

    @contextmanager
    def guard(self, what: str, accumulator: StepAccumulator) -> Iterator[None]:
        """Within the block an error is reported and counted; tensors made there have no graph.

        Raises:
            MonitorError: If errors are to be raised.
        """
        with failing_alone(lambda error: self.not_taken(what, error, accumulator)), torch.no_grad():
            yield

    def not_taken(self, what: str, error: Exception, accumulator: StepAccumulator) -> None:
        """Report and count an error that costs one kind of values of a step."""
        sentence = f"The {what} of this step could not be taken"
        self.count(sentence, sentence, error, accumulator)

    def of_stream(self, stream: Stream, name: str, tensor: str, error: Exception) -> None:
        """Report a statistic or function that failed; ``tensor`` describes what it was computed from."""
        where = f"{stream.kind} {stream.site!r}" if stream.site else stream.keys.get(name, stream.kind)
        message = f"{where}, {tensor}: {name} failed with {type(error).__name__}: {_first_line(error)}"
        self.report(f"{message}. It is recorded as NaN.", error, f"{stream.kind} {name} {type(error).__name__}")

    def report(self, message: str, error: Exception, once: str = "", *, is_counted: bool = True) -> None:
        """Report an error.

        Args:
            message: A sentence.
            error: The error.
            once: What is reported once, by default the message itself.
            is_counted: Whether it is counted elsewhere: an error outside of an open step has no record.

        Raises:
            MonitorError: If errors are to be raised.
        """
        if self._raises:
            raise MonitorError(message) from error
        if (once or message) not in self._reported:
            self._reported.add(once or message)
            self._logger.warning("%s Logged once%s.", message, "; monitor/errors counts them" if is_counted else "")

    def count(self, what: str, once: str, error: Exception, accumulator: StepAccumulator) -> None:
        """Report and count an error that costs some values of a step.

        Args:
            what: Begin of a sentence, e.g. "The reference could not run".
            once: One error is reported for each pair of this name and the type of the error.
            error: The error.
            accumulator: Of the step.

        Raises:
            MonitorError: If errors are to be raised.
        """
        accumulator.num_errors += 1
        name = type(error).__name__
        self.report(f"{what} ({name}: {_first_line(error)}).", error, f"{once} {name}")

    def log_once(self, message: str, level: int = logging.INFO, once: str = "", error: Exception | None = None) -> None:
        """Log a message once, with the traceback of an error; one that is no problem is logged by one of several ranks."""
        if (level >= logging.WARNING or self.is_first()) and (once or message) not in self._reported:
            self._reported.add(once or message)
            self._logger.log(level, message, exc_info=error)

    def suppress(self, once: str) -> None:
        """Log no message of this name any more, in all runs of the model: its cause is known not to exist."""
        self._reported.add(once)


def _first_line(error: Exception) -> str:
    """The first line of an error's message, shortened: some of torch's have instructions for its developers."""
    return textwrap.shorten(str(error).strip().partition("\n")[0], MAX_MESSAGE)


class StepTools(NamedTuple):
    """The objects that all probes of a step share."""

    accumulator: StepAccumulator
    names: ModelIndex
    """Names further outputs, inputs and heads."""
    reporter: ErrorReporter
    gate: Gate

    def observes_calls(self) -> bool:
        """Whether this step takes the calls of modules that are made now."""
        return self.gate.observer_of_calls is self.accumulator

    def is_suspended(self) -> bool:
        """Whether a loop of another stage runs in the middle of the step. If not, the reference's calls count though the gate is closed."""
        return self.gate.current is not self.accumulator

    def output_name(self, site: str, path: Path) -> str:
        """The name of an output of a module; of the output itself, or the first element of it, the module's own."""
        return site if is_first(path) else self.names.output_name(site, path)

    def output_stream(self, stream: Stream, path: Path) -> Stream:
        """The stream of an output of a module; of the output itself, or the first element of it, the module's own."""
        name = self.output_name(stream.site, path)
        return stream if name == stream.site else stream.at(name)

    def log_unsupported(self, what: str, names: Mapping[torch.dtype | type, list[str]], consequence: str = "") -> None:
        """Log the names of outputs or parameters that are no real floating tensors, in one line for each dtype or class."""
        for kind, sites in names.items():
            description = f"dtype {kind}" if isinstance(kind, torch.dtype) else f"class {kind.__name__}"
            why = "only real floating ones are" if isinstance(kind, torch.dtype) else "no tensor is found in them"
            self.reporter.log_once(f"{shortened(sites)}: {what} of {description} are not recorded; {why}. {consequence}".rstrip())

    def report_not_captured(self, what: str, error: Exception) -> None:
        """Report and count a raw tensor that could not be captured."""
        self.reporter.count(f"{what} could not be captured", "capture", error, self.accumulator)


class Probe:
    """Observes one step from :meth:`attach` to :meth:`close`. A probe overrides the phases that concern it."""

    def attach(self) -> None:
        """Register the hooks."""

    def end_micro_batch(self) -> None:
        """One of several micro-batches of the step is over."""

    def finish(self) -> None:
        """The step is over: record what was deferred. Before :meth:`close`."""

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call does nothing."""

"""structlog set up once per process: a console line at a terminal, JSON elsewhere; leaves what is said to callers."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["auto", "console", "json"]
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def configure(service: str, level: str = "info", log_format: LogFormat = "auto") -> None:
    """Route structlog to stderr. `level` is one of debug, info, warning, error, critical."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # one write a line: processes share it
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(stream=sys.stderr, level=_LEVELS[level], format="%(levelname)s: %(message)s")


def set_level(level: str) -> None:
    """Change what is logged from now on. Raises KeyError for an unknown level."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]))
    logging.getLogger().setLevel(_LEVELS[level])

"""Everything a route needs, put together once; leaves building it to service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from services.tokenizer import calls
from services.tokenizer.access import Access
from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.exchange import Answerer, Exchange
from services.tokenizer.exposition import Exposition
from services.tokenizer.frontend import Frontend
from services.tokenizer.labels import CustomLabels
from services.tokenizer.metrics import Measurements, RequestTimer
from services.tokenizer.model_folder import ModelFolder
from services.tokenizer.response_store import ResponseStore
from services.tokenizer.sampling import SeedSource
from services.tokenizer.sessions import Sessions
from services.tokenizer.streams import Group
from services.tokenizer.text import TextEngine
from services.tokenizer.vocabulary import Vocabulary
from shared import ints
from shared.config import TokenizerConfig

log = structlog.get_logger(__name__)

IGNORED_HEADER = "x-radixfleet-ignored"
_MAX_IGNORED = 32


@dataclass(slots=True)
class BodyBudget:
    """Bytes of bodies being read and decoded, all requests together."""

    limit: int
    held: int = 0


@dataclass(slots=True)
class Context:
    """The rooms behind the routes."""

    config: TokenizerConfig
    model: ModelFolder
    text: TextEngine
    vocabulary: Vocabulary
    frontend: Frontend
    measurements: Measurements
    exposition: Exposition
    seeds: SeedSource
    started_at: int
    version: str
    bodies: BodyBudget
    access: Access
    responses: ResponseStore
    sessions: Sessions = field(default_factory=Sessions.shared)
    labels: CustomLabels = field(default_factory=CustomLabels)
    _ignored_seen: set[str] = field(default_factory=set)

    @property
    def limit(self) -> int:
        """The most tokens prompt and answer may have together."""
        status = self.frontend.status
        allowed = status.max_request_tokens if status is not None else 0
        return min(self.model.context_length, allowed) if allowed else self.model.context_length

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not here."""
        if name not in (None, "default", self.model.served_name, self.model.name, self.model.path):
            raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")

    def ignored(self, names: list[str]) -> dict[str, str]:
        """The header that lists fields nobody here knows; each is logged once. Raises ApiError in strict mode."""
        self.refuse_unknown(names)
        if not names:
            return {}
        shown = [_in_a_header(name) for name in names[:_MAX_IGNORED]]
        for name in shown:
            if name not in self._ignored_seen and len(self._ignored_seen) < 1000:
                self._ignored_seen.add(name)
                log.info("unknown field ignored", field=name)
        more = ["..."] if len(names) > _MAX_IGNORED else []
        return {IGNORED_HEADER: ", ".join(shown + more)}

    def refuse_unknown(self, names: list[str]) -> None:
        """With --strict-fields, 400 for fields that nobody knows."""
        if names and self.config.strict_fields:
            shown = ", ".join(name[:64] for name in names[:_MAX_IGNORED])
            raise invalid(f"Unknown fields: {shown}.", names[0][:64], "unknown_parameter")

    def exchange(
        self,
        group: Group,
        answerer: Answerer,
        timer: RequestTimer,
        *,
        streaming: bool,
        headers: Mapping[str, str],
    ) -> Exchange:
        values = calls.current().labels
        if values:
            timer.on_close = lambda finished: self._count_labels(values, group, finished)
        return Exchange(
            self.frontend,
            group,
            answerer,
            timer,
            streaming=streaming,
            keep_alive_interval=self.config.keep_alive_interval,
            headers=headers,
            offload=self.text.run,
        )

    def _count_labels(self, values: tuple[str, ...], group: Group, finished: bool) -> None:
        prompts = {id(stream.request.prompt_ids): stream.request.prompt_ids for stream in group.streams}
        self.labels.count(
            values,
            finished=finished,
            prompt_tokens=sum(map(ints.count, prompts.values())),
            output_tokens=sum(stream.received for stream in group.streams),
        )


def _in_a_header(name: str) -> str:
    """A client's name of a field, short, visible and without what separates names: others are written as escapes."""
    return ascii(name)[1:-1].replace(",", "\\x2c")[:64]

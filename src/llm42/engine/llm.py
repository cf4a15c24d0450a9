"""The blocking front end: `LLM.generate` and `LLM.chat`, for scripts and notebooks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm
from typing_extensions import Self

from llm42.config import EngineConfig
from llm42.engine.collect import OutputCollector, failure
from llm42.engine.engine import Engine, Prompt, RequestGroup
from llm42.engine.frontend import Frontend
from llm42.errors import RequestError
from llm42.outputs import RequestOutput
from llm42.sampling.params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": "user", "content": "..."}, ...]``."""


class LLM(Frontend):
    """A model, ready to generate.

    Args:
        model: A pulled name (``smollm2-135m-instruct``), a directory, a GGUF file, or a hub id.
        **fields: Fields of `EngineConfig`.

    Raises:
        ModelError: The model cannot be loaded.
        ValueError: A field is out of range, or does not fit the model.
    """

    def __init__(self, model: str, **fields: Any) -> None:
        self._open_engine: Engine | None = Engine(EngineConfig(model=str(model), **fields))
        self._lock = threading.Lock()

    @property
    def _engine(self) -> Engine:
        if self._open_engine is None:
            raise RequestError("the engine is closed")
        return self._open_engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, batched as the engine sees fit.

        Args:
            prompts: Strings, or ``{"prompt_token_ids": [...]}``.
            sampling_params: One for all prompts, or a list with one for each.
            use_tqdm: Show a progress bar with tokens/s; never shown where stderr is not a terminal.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: A prompt or a parameter is unusable; nothing was generated.
            RequestError: Requests failed while running; all outputs are in its ``outputs``. Or the engine is closed.
        """
        engine = self._engine
        prompts = _list_of_prompts(prompts)
        params = _one_for_each(sampling_params, len(prompts))
        names = [f"prompts[{index}]" if len(prompts) > 1 else "" for index in range(len(prompts))]
        groups = [_make_group(engine, *call) for call in zip(prompts, params, names, strict=True)]
        collectors = [OutputCollector(group, engine.tokenizer) for group in groups]
        with self._lock:
            self._run(groups, collectors, use_tqdm=use_tqdm)
        outputs = [collector.take() for collector in collectors]
        failures = [reason for group in groups if (reason := failure(group)) is not None]
        if failures:
            raise RequestError("; ".join(failures), outputs)
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_fields: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or many, by the model's chat template.

        Args:
            messages: A conversation, or a list of conversations.
            sampling_params: As in `generate`.
            use_tqdm: As in `generate`.
            **template_fields: Handed to the template (``add_generation_prompt``, ``enable_thinking``, ...).
        """
        if not _is_list(messages):
            raise ValueError(f"messages must be a conversation or a list of conversations, not {messages!r:.80}")
        conversations = cast(
            "Sequence[Messages]", [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        prompts = [
            {"prompt_token_ids": self.tokenizer.apply_chat_template(conversation, **template_fields)}
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Release the model's memory, after a call that is running; later ones raise `RequestError`."""
        with self._lock:
            self._open_engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, groups: Sequence[RequestGroup], collectors: Sequence[OutputCollector], *, use_tqdm: bool) -> None:
        engine = self._engine
        core, queue = engine.core, deque(groups)
        max_queue_len = engine.config.max_queue_len
        # Anybody in this process may have changed the thread count since, and it is part of the contract.
        engine.pin_threads()
        num_done = num_tokens = 0
        # disable=None: tqdm itself stays silent where stderr is not a terminal.
        with tqdm(total=len(groups), unit="request", disable=None if use_tqdm else True, dynamic_ncols=True) as bar:
            try:
                while queue or core.has_work:
                    while queue and len(core.scheduler.waiting) + len(queue[0].sequences) <= max_queue_len:
                        core.add(queue.popleft().sequences)
                    before = sum(1 for request in core.step() if request.is_finished)
                    if bar.disable or not before:
                        continue
                    done = sum(collector.is_finished for collector in collectors)
                    num_tokens = sum(seq.ledger.num_committed for group in groups for seq in group.sequences)
                    bar.set_postfix_str(
                        f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.1f} tok/s", refresh=False
                    )
                    bar.update(done - num_done)
                    num_done = done
            except BaseException:
                for group in groups:
                    for sequence in group.sequences:
                        core.cancel(sequence)
                raise


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _list_of_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a prompt or a list of prompts, not {prompts!r:.80}")
    return list(prompts)


def _make_group(engine: Engine, prompt: Prompt, params: SamplingParams | None, name: str) -> RequestGroup:
    """The prompt's request; ``name`` says in an error which prompt it was, where there are several."""
    try:
        return engine.make_requests(prompt, params)
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _one_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not _is_list(sampling_params):
        raise ValueError(f"sampling_params must be a SamplingParams or a list of them, not {sampling_params!r:.80}")
    if len(sampling_params) != count:
        raise ValueError(f"sampling_params has {len(sampling_params)} entries for {count} prompts; give one for each")
    return list(sampling_params)

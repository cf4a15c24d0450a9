"""inspect-ai: a task over GSM8K through its provider for OpenAI-compatible servers."""

from __future__ import annotations

from contract import Job, Outputs, run
from inspect_ai import Task, eval  # noqa: A004  its name for it
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate


def run_level(job: Job, level: int) -> Outputs:
    """The task."""
    dataset = json_dataset(job.gsm8k, FieldSpec(input="question", target="answer"))
    model = get_model(f"openai-api/llm42/{job.model}", base_url=f"{job.url}/v1", api_key="none", memoize=False)
    (log,) = eval(
        Task(dataset=dataset, solver=generate(), scorer=match(numeric=True)),
        model=model,
        limit=job.limit,
        max_connections=level,
        max_samples=level,
        max_tokens=job.max_tokens,
        temperature=0.7,
        seed=42,
        log_dir=f"{job.folder}/{level}",
        display="none",
    )
    if log.status != "success" or log.results is None:
        raise RuntimeError(f"inspect-ai: {log.error}")
    outputs = {str(sample.id): sample.output.completion for sample in log.samples or ()}
    (score,) = log.results.scores
    return {**outputs, "scores": {name: metric.value for name, metric in score.metrics.items()}}


run(run_level)

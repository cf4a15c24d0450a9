"""litellm: chat completions of a batch, with log-probabilities and seeds."""

from __future__ import annotations

import litellm
from contract import Job, Outputs, run


def run_level(job: Job, level: int) -> Outputs:
    """The batch."""
    responses = litellm.batch_completion(
        model=f"openai/{job.model}",
        messages=[[{"role": "user", "content": question}] for question in job.questions],
        api_base=f"{job.url}/v1",
        api_key="none",
        max_tokens=job.max_tokens,
        temperature=0.7,
        seed=42,
        logprobs=True,
        max_workers=level,
    )
    for response in responses:
        if isinstance(response, Exception):
            raise response
    choices = [response.choices[0].model_dump() for response in responses]
    return dict(zip(job.questions, choices, strict=True))


run(run_level)

"""langchain-openai: a batch of chat completions, with log-probabilities and seeds."""

from __future__ import annotations

from contract import Job, Outputs, run
from langchain_openai import ChatOpenAI


def run_level(job: Job, level: int) -> Outputs:
    """The batch."""
    chat = ChatOpenAI(
        model=job.model,
        base_url=f"{job.url}/v1",
        api_key="none",
        max_tokens=job.max_tokens,
        temperature=0.7,
        seed=42,
        logprobs=True,
    )
    messages = chat.batch(job.questions, config={"max_concurrency": level})
    return {
        question: [message.content, message.response_metadata["logprobs"]["content"]]
        for question, message in zip(job.questions, messages, strict=True)
    }


run(run_level)

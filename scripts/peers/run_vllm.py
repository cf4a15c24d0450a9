"""vLLM's CPU build, through its offline `LLM`. The environment variables it is steered by are set by main.py."""

from __future__ import annotations

import vllm
from recording import Session


def main() -> None:
    """Measure it with the options of the command line."""
    session = Session("vllm")
    options = session.options
    llm = vllm.LLM(
        model=options.model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [vllm.SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    session.measure(generate, vllm.__version__, dtype="bfloat16")


if __name__ == "__main__":
    main()

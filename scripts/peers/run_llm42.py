"""This engine, through its Python API, in the same way as its peers."""

from __future__ import annotations

from recording import Session

import llm42
from llm42 import LLM, SamplingParams


def main() -> None:
    """Measure it with the options of the command line."""
    session = Session(
        "llm42",
        lambda parser: parser.add_argument("--deterministic", action="store_true", help="for all requests"),
    )
    options = session.options
    # Prefix caching is off in all engines: the same prompts come again at every level.
    llm = LLM(
        options.model,
        num_threads=options.threads,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, deterministic=options.deterministic)
            for length in lengths
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    session.measure(
        generate,
        llm42.__version__,
        mode=llm.config.mode,
        kernels=llm.contract["kernels"],
        deterministic=options.deterministic,
        fingerprint=llm.system_fingerprint,
    )


if __name__ == "__main__":
    main()

"""lm_eval's own command line: HellaSwag by log-likelihoods, GSM8K by chat completions.

Tasks and data are local files. Compared are every sample's responses (log-likelihoods as floats) and all scores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from contract import Job, Outputs, run
from lm_eval.__main__ import cli_evaluate

_HELLASWAG = """
task: llm42_hellaswag
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
_GSM8K = """
task: llm42_gsm8k
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  max_gen_toks: {max_tokens}
  until: ["Question:"]
filter_list:
  - name: last-number
    filter:
      - function: regex
        regex_pattern: "(-?[0-9][0-9.,]*)"
        group_select: -1
      - function: take_first
metric_list:
  - metric: exact_match
"""


def run_level(job: Job, level: int) -> Outputs:
    """Both tasks."""
    tasks = Path(job.folder) / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / "hellaswag.yaml").write_text(_HELLASWAG.format(path=job.hellaswag), encoding="utf-8")
    (tasks / "gsm8k.yaml").write_text(_GSM8K.format(path=job.gsm8k, max_tokens=job.max_tokens), encoding="utf-8")
    completions = f"base_url={job.url}/v1/completions,tokenizer={job.tokenizer},tokenizer_backend=huggingface"
    chat = f"base_url={job.url}/v1/chat/completions"
    return {
        **_evaluate(job, level, "local-completions", completions, "llm42_hellaswag"),
        **_evaluate(job, level, "local-chat-completions", chat, "llm42_gsm8k", "--apply_chat_template"),
    }


def _evaluate(job: Job, level: int, client: str, arguments: str, task: str, *options: str) -> Outputs:
    folder = Path(job.folder) / f"{task}-{level}"
    sys.argv = [
        *("lm_eval", "run", "--model", client, "--tasks", task, "--include_path", str(Path(job.folder) / "tasks")),
        *("--model_args", f"model={job.model},num_concurrent={level},{arguments}"),
        *("--limit", str(job.limit), "--log_samples", "--output_path", str(folder), *options),
    ]
    cli_evaluate()
    (samples,) = folder.rglob("samples_*.jsonl")
    (results,) = folder.rglob("results_*.json")
    outputs = {
        f"{task} {sample['doc_id']} {sample['filter']}": sample["resps"]
        for sample in map(json.loads, samples.read_text(encoding="utf-8").splitlines())
    }
    scores = json.loads(results.read_text(encoding="utf-8"))["results"][task]
    return {**outputs, f"{task} scores": {name: value for name, value in scores.items() if "," in name}}


run(run_level)

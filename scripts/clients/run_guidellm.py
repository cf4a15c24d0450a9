"""guidellm's own command line: synthetic prompts of one seed at a concurrency; outputs are matched by prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from contract import Job, Outputs, run


def run_level(job: Job, level: int) -> Outputs:
    """The benchmark."""
    report = Path(job.folder) / f"{level}.json"
    # It sends no seed by itself, and its outputs would be other ones every time.
    backend = {"kind": "openai_http", "target": job.url, "model": job.model, "extras": {"body": {"seed": 42}}}
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--backend", json.dumps(backend)),
        *("--profile", f"kind=concurrent,streams={level}", "--constraint", f"kind=max_requests,count={job.limit}"),
        *("--tokenizer", f"kind=hf_auto,model={job.tokenizer}", "--seed", "kind=static,value=42"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={job.max_tokens}"),
        *("--output", f"kind=json,path={report}", "--disable-console"),
    ]
    subprocess.run(command, check=True)
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    if requests["errored"] or len(requests["successful"]) != job.limit:
        raise RuntimeError(f"guidellm: {len(requests['successful'])} of {job.limit} requests were answered")
    return {_prompt(request): request["output"] for request in requests["successful"]}


def _prompt(request: dict) -> str:
    return json.dumps(json.loads(request["request_args"])["body"]["messages"])


run(run_level)

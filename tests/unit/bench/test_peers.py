"""scripts/bench peers: tables from result files, failures that stay visible, and the recorder that runners share."""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "peers"


@pytest.fixture(scope="module")
def load():
    """A function that imports a module of scripts/peers, which is no package."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name in ("main", "tables", "recording", "environments"):
        sys.modules.pop(name, None)


@pytest.fixture
def tables(load):
    return load("tables")


def run(output_tokens, wall_s, prompt_tokens=256):
    return {"wall_s": wall_s, "num_requests": 2, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}


def result(engine, rates, outputs, startup_s=2.0, peak_rss_mib=1000.0):
    """A result file: ``rates`` are output tok/s of runs, ``outputs`` their token ids."""
    return {
        "engine": engine,
        "version": "1.2-build",
        "settings": {},
        "startup_s": startup_s,
        "peak_rss_mib": peak_rss_mib,
        "runs": {name: run(100, 100 / rate) for name, rate in rates.items()},
        "outputs": outputs,
    }


@pytest.fixture
def directory(tmp_path):
    """Results of two rounds of three engines, of which one failed in its second round."""
    files = {
        "llm42-round1": result("llm42", {"c1": 40, "c8": 200}, {"c1": [[1], [2]], "c8": [[1], [2]]}),
        "llm42-round2": result("llm42", {"c1": 44, "c8": 220}, {"c1": [[1], [2]], "c8": [[1], [2]]}),
        "vllm-round1": result("vllm", {"c1": 30, "c8": 210}, {"c1": [[1], [3]], "c8": [[1], [4], [5]]}, 100.0, 5000.0),
        "openvino-round1": result("openvino", {"c1": 32, "c8": 150}, {"c1": [[1], [2]], "c8": [[9], [8]]}),
        "openvino-round2": result("openvino", {"c1": 36, "c8": 170}, {"c1": [[1], [7]], "c8": [[9], [8]]}),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    plan = {"engines": ["llm42", "vllm", "openvino"], "failures": {"vllm": "python was ended by signal 9"}}
    (tmp_path / "run.json").write_text(json.dumps(plan), encoding="utf-8")
    return tmp_path


def rendered(renderables):
    file = io.StringIO()
    console = Console(file=file, width=160)
    for renderable in renderables:
        console.print(renderable)
    return file.getvalue()


def rows(table):
    names = [column.header for column in table.columns]
    return {
        cells[0]: dict(zip(names, cells, strict=True)) for cells in zip(*(c.cells for c in table.columns), strict=True)
    }


def test_speeds_are_medians_and_ranges_of_the_rounds(tables, directory):
    speed = rows(tables.tables(tables.load_rounds(directory))[0])
    assert speed["llm42"]["c1"] == "42 (40-44)"
    assert speed["openvino"]["c8"] == "160 (150-170)"
    assert speed["vllm (FAILED)"]["c1"] == "30"


def test_ratios_are_to_the_better_peer_of_each_run(tables, directory):
    speed = rows(tables.tables(tables.load_rounds(directory))[0])
    assert speed["llm42 / better peer"]["c1"] == f"{42 / 34:.2f}"
    assert speed["llm42 / better peer"]["c8"] == f"{210 / 210:.2f}"


def test_without_peers_there_is_no_ratio(tables, directory):
    ours = [rounds for rounds in tables.load_rounds(directory) if rounds.is_ours]
    assert not any("/" in name for table in tables.tables(ours) for name in rows(table))
    assert tables.ratio(ours[0], ours, "c1") is None


def test_changed_outputs_are_counted_between_levels_and_between_processes(tables, directory):
    facts = rows(tables.tables(tables.load_rounds(directory))[1])
    assert facts["llm42"]["changed, levels"] == "0 of 2"
    assert facts["vllm (FAILED)"]["changed, levels"] == "1 of 2"
    assert facts["openvino"]["changed, levels"] == "2 of 2"
    assert facts["llm42"]["again"] == "0 of 4"
    assert facts["openvino"]["again"] == "1 of 4"
    assert facts["vllm (FAILED)"]["again"] == "-"


def test_start_memory_and_version_are_shown(tables, directory):
    facts = rows(tables.tables(tables.load_rounds(directory))[1])
    assert facts["vllm (FAILED)"]["first token s"] == "100.0"
    assert facts["vllm (FAILED)"]["peak RSS MiB"] == "5000"
    assert facts["llm42"]["version"] == "1.2"


def test_a_failed_engine_is_named_with_its_reason(tables, directory):
    all_rounds = tables.load_rounds(directory)
    assert tables.failures(all_rounds) == ["vllm: python was ended by signal 9"]
    assert "vllm (FAILED)" in rendered(tables.tables(all_rounds))


def test_an_engine_without_any_result_still_has_a_row(tables):
    nothing = tables.Rounds("vllm", [], "cannot be installed")
    ours = tables.Rounds("llm42", [result("llm42", {"c1": 40}, {"c1": [[1]]})])
    for table in tables.tables([ours, nothing]):
        assert rows(table)["vllm (FAILED)"]["engine"] == "vllm (FAILED)"
    assert tables.ratio(ours, [ours, nothing], "c1") is None


def test_prefill_counts_prompt_tokens(tables):
    one = result("vllm", {}, {})
    one["runs"] = {"prefill_c1": run(2, 2.0, 256), "prefill_long": run(1, 4.0, 1024)}
    facts = rows(tables.tables([tables.Rounds("vllm", [one])])[1])
    assert facts["vllm"]["prefill c1"] == "128"
    assert facts["vllm"]["long prompts"] == "256"


@pytest.fixture
def session(load, tmp_path, monkeypatch):
    """A function of options to the recorder of a runner, on a small workload; and the file it writes."""
    recording = load("recording")
    workload = {
        "fixed": [[1, 2], [3, 4], [5, 6], [7, 8], [9, 9]],
        "long": [[1] * 8],
        "mixed": [([1], 2), ([2, 2], 3)],
        "output_len": 4,
    }
    (tmp_path / "workload.json").write_text(json.dumps(workload), encoding="utf-8")
    out = tmp_path / "out.json"

    def start(*options):
        arguments = ["--model", "m", "--workload", str(tmp_path / "workload.json"), "--out", str(out), "--started", "0"]
        arguments += ["--threads", "1", "--max-num-seqs", "4", "--levels", "1,2", *options]
        monkeypatch.setattr(sys, "argv", ["run", *arguments])
        return recording.Session("toy")

    return start, out


def test_a_runner_runs_every_part_in_batches_of_the_level_and_records_it(session, capsys):
    start, out = session
    calls = []

    def generate(prompts, lengths):
        calls.append((len(prompts), lengths[0]))
        return [prompt[:1] * length for prompt, length in zip(prompts, lengths, strict=True)]

    start("--max-batches", "2").measure(generate, "1.0", kind="toy")
    found = json.loads(out.read_text(encoding="utf-8"))
    assert list(found["runs"]) == ["c1", "c2", "prefill_c1", "prefill_c2", "prefill_long", "mixed"]
    assert calls[:2] == [(1, 1), (2, 8)]  # first token, warm-up
    assert calls[2:6] == [(1, 4), (1, 4), (2, 4), (2, 4)]
    assert found["outputs"]["c2"] == [[1] * 4, [3] * 4, [5] * 4, [7] * 4]
    assert found["runs"]["c2"]["output_tokens"] == 16
    assert found["runs"]["prefill_c2"]["prompt_tokens"] == 10
    assert found["runs"]["mixed"]["output_tokens"] == 5
    assert found["settings"] == {"kind": "toy"}
    assert found["startup_s"] > 0
    assert all(line.startswith("> toy  ") for line in capsys.readouterr().out.splitlines())


def test_an_engine_that_generates_less_than_was_asked_is_an_error_and_not_fast(session):
    start, _ = session
    with pytest.raises(RuntimeError, match="c1: an output has not as many tokens"):
        start().measure(lambda prompts, _lengths: [[1] for _ in prompts], "1.0")


def test_peak_memory_counts_this_process_and_its_children(load):
    peak = load("recording").peak_rss_mib()
    if peak is None:
        pytest.skip("this system does not tell peak memory")
    assert peak > 10


def test_a_command_that_fails_gives_the_end_of_what_it_said(load, tmp_path):
    environments = load("environments")
    command = [sys.executable, "-c", "import sys; print('> nearly there'); sys.exit('no such wheel')"]
    with pytest.raises(environments.PeerError, match=r"failed with status 1(?s:.*)no such wheel"):
        environments.run_logged(command, tmp_path / "log")
    assert "nearly there" in (tmp_path / "log").read_text(encoding="utf-8")


def test_the_command_line_says_what_it_does_not_know(load, monkeypatch, capsys):
    main = load("main")
    for arguments in (["--engines", "tgi"], ["--levels", "1,x"], ["--rounds", "0"], ["--parts", "all"]):
        monkeypatch.setattr(sys, "argv", ["peers", *arguments])
        with pytest.raises(SystemExit) as caught:
            main.main()
        assert caught.value.code == 2
        assert arguments[0] in capsys.readouterr().err


def test_a_report_prints_the_tables_of_an_earlier_run_and_fails_where_an_engine_failed(
    load, directory, monkeypatch, capsys
):
    main = load("main")
    monkeypatch.setattr(sys, "argv", ["peers", "--report", str(directory)])
    assert main.main() == 1
    text = capsys.readouterr().out
    assert "42 (40-44)" in text
    assert "FAILED vllm: python was ended by signal 9" in text


def test_a_peer_that_cannot_be_installed_leaves_the_others_running(load, tmp_path, monkeypatch, capsys):
    main = load("main")
    monkeypatch.setattr(main, "BENCH", tmp_path / "bench")
    monkeypatch.setattr(main, "make_workload", lambda _model, _size: {})

    def command_for(engine, _model, _cores):
        if engine == "vllm":
            raise main.PeerError("pip failed with status 1")
        code = (
            "import json, sys; out = sys.argv[sys.argv.index('--out') + 1]; "
            "open(out, 'w').write(json.dumps({'runs': {}, 'outputs': {}, 'version': '1', 'startup_s': 1, "
            "'peak_rss_mib': 1}))"
        )
        return main.Command([sys.executable, "-c", code], {})

    monkeypatch.setattr(main, "command_for", command_for)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    arguments = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["peers", *arguments, "--engines", "vllm,openvino"])
    assert main.main() == 1
    captured = capsys.readouterr()
    assert "FAILED vllm: pip failed with status 1" in captured.out
    assert "round 2/2: openvino" in captured.err
    assert len(list((tmp_path / "out").glob("openvino-round*.json"))) == 2

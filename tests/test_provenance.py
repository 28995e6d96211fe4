"""The record of where a run took place, and what of it is compared."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import frl
from frl import provenance
from frl.provenance import COMPARED, environment_record, moved


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *arguments], check=True, capture_output=True)

    try:
        git("init", "-q")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-qm", "first")
    return tmp_path


def head(repository: Path) -> str:
    return subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def commit(path: Path, tracks: str | None = None) -> str | None:
    return provenance._commit.__wrapped__(path, tracks)


def test_the_record():
    record = environment_record(torch.device("cpu"), "aot_eager")
    assert record["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert (record["device"], record["compile_mode"]) == ("cpu", "aot_eager")
    assert {*COMPARED, "numpy", "python", "system", "cpu_count", "commit", "created_at"} <= set(record)
    assert record["frl"] in (frl.__version__, None)


def test_the_commit_and_whether_files_differ_from_it(repository: Path):
    assert commit(repository) == head(repository)
    (repository / "new.py").write_text("not tracked")
    assert commit(repository) == head(repository)
    (repository / "a.py").write_text("2")
    assert commit(repository) == f"{head(repository)}-dirty"


def test_no_commit_outside_a_repository_and_for_an_installed_copy_below_one(repository: Path, tmp_path_factory: pytest.TempPathFactory):
    assert commit(tmp_path_factory.mktemp("plain")) is None
    assert commit(repository, "a.py") == head(repository)
    (repository / "site").mkdir()
    (repository / "site" / "b.py").write_text("")
    assert commit(repository / "site", "b.py") is None


def test_no_git_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert commit(tmp_path) is None


def test_what_has_moved():
    record = environment_record(torch.device("cpu"), "eager")
    assert moved(record, record) == []
    other = {**record, "threads": 7, "torch": "1.0", "created_at": "never", "cpu_count": 1000}
    assert moved(other, record) == [f"torch '1.0' -> {record['torch']!r}", f"threads 7 -> {record['threads']!r}"]
    assert moved({}, record)  # an older record that lacks an entry

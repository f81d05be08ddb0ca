"""Runs that are damaged, edited, deleted, locked or interrupted by a hang-up."""

from __future__ import annotations

import json
import shutil
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_bit_flips import silent_changes
from small_runs import content, equal, interrupt, metrics, small, tensors, train_run

from bit_flips import flipped
from regard import tensor_io
from regard.data.cache_key import cache_folder
from regard.data.stream import BatchShare
from regard.errors import RegardWarning, UserError
from regard.files import DirectoryLock, atomic_write, write_text
from regard.recipes import to_toml
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.tasks.translation import TranslationTask
from regard.training import loop
from regard.training.loop import Interrupted, Trainer
from regard.verify import accept, verify

# -- one trainer at a time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["learn_tokenizers", "dataset", "stream", "validator"])
def test_a_second_trainer_is_refused_at_every_stage_and_changes_nothing(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = TranslationTask
    out, first = tmp_path / "run", getattr(module, moment)

    def train_twice(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(module, moment, first)
        before = content(out)
        with pytest.raises(UserError, match="another process is training there"):
            train_run(small(tmp_path, steps=4, seed=2, data={"corpus": "reverse", "count": 30}), out)
        assert content(out) == before
        return first(*arguments, **named)

    monkeypatch.setattr(module, moment, train_twice)
    recipe = small(tmp_path, steps=4)
    run = train_run(recipe, out)
    assert getattr(module, moment) is first and RunDir(out).recipe == recipe
    assert equal(tensors(run.best), tensors(train_run(recipe, tmp_path / "alone").best))


def test_a_folder_with_other_files_is_refused_before_anything_is_written_there(tmp_path: Path) -> None:
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").write_text("meow")
    with pytest.raises(UserError, match="exists and is not a run directory"):
        train_run(small(tmp_path), other)
    assert [file.name for file in other.iterdir()] == ["cat.jpg"]


def test_a_lock_is_held_until_it_is_released(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "new", "training")
    with pytest.raises(UserError, match="another process is training there"):
        DirectoryLock(tmp_path / "new", "training")
    lock.ensure_held()
    lock.release()
    with DirectoryLock(tmp_path / "new", "training"):
        pass


# -- a directory that is deleted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["an update", "the last save", "after the last save"])
@pytest.mark.parametrize("instead", ["nothing", "another run"])
def test_a_run_directory_deleted_while_it_trains_stops_the_training(
    moment: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, update, save = tmp_path / "run", Trainer._take_step, tensor_io.save
    other = train_run(small(tmp_path, steps=2), tmp_path / "other")

    def delete() -> None:
        shutil.rmtree(out)
        if instead == "another run":
            shutil.copytree(other.path, out)

    def update_and_delete(self: Trainer, share: BatchShare) -> None:
        update(self, share)
        if moment == "an update" and self.progress.step == 5:
            delete()

    def save_and_delete(path: Path, tensors: Any, about: Any) -> None:
        if moment == "the last save" and about.get("finished"):
            delete()
        save(path, tensors, about)
        if moment == "after the last save" and about.get("finished"):
            delete()

    monkeypatch.setattr(Trainer, "_take_step", update_and_delete)
    monkeypatch.setattr(tensor_io, "save", save_and_delete)
    with pytest.raises(UserError, match=r"run was deleted, moved or replaced while training went on"):
        train_run(small(tmp_path), out)
    if instead == "another run" and moment != "the last save":
        assert {f.relative_to(out): c for f, c in content(out).items()} == {
            f.relative_to(other.path): c for f, c in content(other.path).items()
        }


# -- temporary files ---------------------------------------------------------------------------------------------------


def test_temporary_files_of_a_killed_save_are_removed_on_resuming(tmp_path: Path) -> None:
    run = train_run(small(tmp_path, steps=4), tmp_path / "run")
    names = [".tmpA1b2C3", ".resume.safetensors.4711.tmp", "snapshots/.tmpzzzzzz", "snapshots/.step.0a1b.tmp"]
    other_files = ["notes.tmp", ".tmp", ".tmpnotes.txt", ".hidden"]
    for name in names + other_files:
        (run.path / name).write_text("half")
    with DirectoryLock(run.path, "training"), pytest.raises(UserError):
        train_run(small(tmp_path, steps=8), run.path)
    assert all((run.path / name).exists() for name in names)  # not without the lock
    train_run(small(tmp_path, steps=8), run.path)
    assert [name for name in names + other_files if (run.path / name).exists()] == other_files


def test_temporary_files_have_random_names_and_never_follow_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, victim = tmp_path / "file", tmp_path / "victim"
    victim.write_text("precious")
    names = set()
    for _ in range(3):
        with atomic_write(target) as temporary:
            names.add(temporary.name)
            temporary.write_text("new")
    assert len(names) == 3 and target.read_text() == "new"
    monkeypatch.setattr("regard.files.secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".file.guessed.tmp").symlink_to(victim)
    with pytest.raises(UserError, match="could not be written"):
        write_text(target, "newer")
    assert victim.read_text() == "precious" and target.read_text() == "new"


# -- signals and saves by time -----------------------------------------------------------------------------------------


def test_sighup_saves_like_any_other_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uninterrupted = train_run(small(tmp_path), tmp_path / "whole")
    interrupt(monkeypatch, at=5, by=signal.SIGHUP)
    with pytest.raises(Interrupted) as caught:
        train_run(small(tmp_path), tmp_path / "run")
    assert caught.value.status == 129
    assert tensor_io.read_metadata(tmp_path / "run" / "resume.safetensors")["step"] == 5
    monkeypatch.undo()
    assert equal(tensors(train_run(small(tmp_path), tmp_path / "run").resume), tensors(uninterrupted.resume))


def test_an_ignored_sighup_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupt(monkeypatch, at=5, by=signal.SIGHUP)
        train_run(small(tmp_path), tmp_path / "run")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert metrics(tmp_path / "run")[-1]["step"] == 12


def test_training_works_on_systems_without_sighup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGHUP")
    train_run(small(tmp_path, steps=2), tmp_path / "run")


def test_training_continues_when_standard_error_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedStream:
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise BrokenPipeError

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr("sys.stderr", ClosedStream())
    assert train_run(small(tmp_path, steps=4), tmp_path / "run", quiet=False).best.exists()


def test_saves_by_time_bound_the_work_that_a_kill_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes at each step. The logged losses do not depend on the saves."""
    uninterrupted = train_run(
        small(tmp_path, save_minutes=0, steps=14, save_every=100, validate_every=100), tmp_path / "whole"
    )
    update, clock, kill_at = Trainer._take_step, [0.0], [0]

    def slow_update(self: Trainer, share: BatchShare) -> None:
        clock[0] += 60
        update(self, share)
        if self.progress.step == kill_at[0]:
            raise MemoryError("killed")

    monkeypatch.setattr(Trainer, "_take_step", slow_update)
    # the trainer's clock alone: an event loop in another thread must not see it
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=time.perf_counter))
    recipe = small(tmp_path, save_minutes=5, steps=14, save_every=100, validate_every=100)
    for kill_at[0], saved in ((4, None), (9, 5), (13, 10)):
        with pytest.raises(MemoryError):
            train_run(recipe, tmp_path / "run")
        resume = tmp_path / "run" / "resume.safetensors"
        assert (tensor_io.read_metadata(resume)["step"] if resume.exists() else None) == saved
    kill_at[0] = 0
    run = train_run(recipe, tmp_path / "run")
    assert not run.snapshots() and equal(tensors(run.resume), tensors(uninterrupted.resume))
    lines = [[{**line, "seconds": 0} for line in metrics(path)] for path in (run.path, uninterrupted.path)]
    assert lines[0] == lines[1]


# -- an edited recipe --------------------------------------------------------------------------------------------------


def edit(run: RunDir, **changes: Any) -> None:
    settings = run.recipe.model_dump()
    for key, value in changes.items():
        section, name = key.split("__")
        settings[section][name] = value
    (run.path / "recipe.toml").write_text(to_toml(Recipe.model_validate(settings)))


def test_an_edited_recipe_is_used_with_a_warning_until_it_is_accepted(tmp_path: Path) -> None:
    run = train_run(small(tmp_path, steps=4), tmp_path / "run")
    edit(run, decoding__beam=7, model__dropout=0.3)
    words = r"recipe.toml was edited since training \(model.dropout from 0.1 to 0.3, decoding.beam from 4 to 7\)"
    with pytest.warns(RegardWarning, match=words):
        assert RunDir(run.path).recipe.decoding.beam == 7
    assert [(f.file.name, f.status, f.why) for f in verify(run.path)][:2] == [
        ("run.json", "ok", ""),
        ("recipe.toml", "edited", "model.dropout, decoding.beam"),
    ]
    accept(run.path)
    assert all(finding.status == "ok" for finding in verify(run.path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RunDir(run.path).recipe.decoding.beam == 7


def test_comments_and_layout_of_a_recipe_may_change(tmp_path: Path) -> None:
    run = train_run(small(tmp_path, steps=4), tmp_path / "run")
    file = run.path / "recipe.toml"
    file.write_text("# mine\n" + "\n".join(line.split("  #")[0] for line in file.read_text().splitlines()))
    assert RunDir(run.path).recipe == run.recipe and not RunDir(run.path).edits()


def test_training_uses_the_given_recipe_and_compares_it_with_the_run_s_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, recipe = train_run(small(tmp_path, steps=4), tmp_path / "run"), small(tmp_path, steps=8)
    edit(run, training__seed=2)
    with pytest.raises(UserError, match=r"training.seed was 1 and is now 2"):
        train_run(small(tmp_path, steps=8, seed=2), run.path)
    train_run(recipe, run.path, quiet=False)
    assert "recipe.toml was edited (training.seed); it is written again" in capsys.readouterr().err
    assert RunDir(run.path).recipe == recipe
    assert equal(tensors(run.resume), tensors(train_run(recipe, tmp_path / "whole").resume))


def test_a_run_of_an_older_format_is_refused_in_one_line(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", small(tmp_path))
    (run.path / "run.json").write_text(json.dumps({"format": 2, "regard": "0.1.0"}))
    with pytest.raises(UserError, match=r"run format 2, made by regard 0\.1\.0.*train the run again$") as error:
        RunDir(run.path)
    assert "\n" not in str(error.value)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_verify_names_what_is_damaged_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    run = train_run(small(tmp_path, validate_lines=2), tmp_path / "run")
    names = ["run.json", "recipe.toml", "tokenizer.json", "model.safetensors"]
    names += [f"snapshots/step-{step:08d}.safetensors" for step in (4, 8, 12)]
    names += ["resume.safetensors", "metrics.jsonl", "samples.jsonl"]
    files = [run.path / name for name in names]
    (folder,) = cache_folder().iterdir()
    assert [(f.file, f.status) for f in verify(run.path)] == [(file, "ok") for file in (*files, folder)]
    for file in (*files, *sorted(folder.iterdir())):
        at = file.stat().st_size // 3
        if file.name == "recipe.toml":  # in a value: a comment may change
            at = file.read_bytes().index(b"\nseed = ") + len("\nseed = ")
        with flipped(file, 8 * at + 1):
            statuses = {finding.file: finding.status for finding in verify(run.path)}
            where = folder if file.parent == folder else file
            assert statuses[where] in ("damaged", "edited"), file
        if file.parent != folder and file.name not in ("run.json", "resume.safetensors") and "step" not in file.name:
            file.rename(tmp_path / "away")
            assert [f.file for f in verify(run.path) if f.status == "missing"] == [file]
            (tmp_path / "away").rename(file)
    with pytest.raises(UserError, match="does not exist"):
        list(verify(tmp_path / "nowhere"))


def test_a_damaged_cache_is_rebuilt_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    run = train_run(small(tmp_path, steps=4), tmp_path / "run")
    (folder,) = cache_folder().iterdir()
    before = content(folder)
    for step, file in enumerate(sorted(folder.iterdir()), 5):
        with open(file, "r+b") as handle:
            handle.write(bytes([before[file][0] ^ 4]))
        train_run(small(tmp_path, steps=step), run.path, quiet=False)
        messages = [line for line in capsys.readouterr().err.splitlines() if "are damaged: rebuilding them" in line]
        assert len(messages) == 1 and str(folder) in messages[0]
        assert content(folder) == before


@pytest.mark.slow
def test_no_flipped_bit_changes_a_result_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert silent_changes(tmp_path, 75, 1, monkeypatch) == []

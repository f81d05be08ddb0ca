"""Threads and the libraries' own settings: chosen before PyTorch is loaded, never against the user's."""

from __future__ import annotations

import os

import pytest

import regard.cli as cli


@pytest.fixture
def environment(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", *cli.CODE_CACHES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("running", "load", "busy"), [(3, 2.0, True), (1, 2.0, False), (3, 0.1, False)], ids=["busy", "after", "moment"]
)
def test_threads_wait_passively_only_where_other_processes_compete(tmp_path, environment, running, load, busy):
    stat = tmp_path / "stat"
    stat.write_text(f"cpu  1 2 3\nprocs_running {running}\nprocs_blocked 0\n")
    environment.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert cli.machine_is_busy(str(stat)) is busy
    environment.setattr(cli, "machine_is_busy", lambda: busy)
    cli.configure_libraries()
    assert os.environ.get("GOMP_SPINCOUNT") == ("0" if busy else None)
    assert {os.environ[cache] for cache in cli.CODE_CACHES} == {"64"}


def test_settings_of_the_user_win(environment):
    environment.setattr(cli, "machine_is_busy", lambda: True)
    environment.setenv("OMP_WAIT_POLICY", "ACTIVE")
    environment.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "500")
    cli.configure_libraries()
    assert "GOMP_SPINCOUNT" not in os.environ and os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "500"


def test_without_linux_the_machine_counts_as_idle(tmp_path):
    assert cli.machine_is_busy(str(tmp_path / "missing")) is False


def test_threads_sets_the_number_of_threads(regard, trained):
    import torch

    before = torch.get_num_threads()
    try:
        result = regard("translate", trained, "--threads", "1", "b a")
        assert result.status == 0 and torch.get_num_threads() == 1
        assert "--threads" in regard("translate", trained, "--threads", "0", "b a").err
    finally:
        torch.set_num_threads(before)

"""The number of threads, and environment variables of libraries, which do not override the user's."""

from __future__ import annotations

import os

import pytest

import regard.cli as cli


@pytest.fixture
def environment(monkeypatch):
    for name in cli.CODE_CACHES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_caches_of_generated_code_are_bounded(environment):
    cli.configure_libraries()
    assert {os.environ[cache] for cache in cli.CODE_CACHES} == {"64"}


def test_environment_variables_of_the_user_have_precedence(environment):
    environment.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "500")
    cli.configure_libraries()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "500"


def test_threads_sets_the_number_of_threads(regard, trained):
    import torch

    before = torch.get_num_threads()
    try:
        result = regard("translate", trained, "--threads", "1", "b a")
        assert result.status == 0 and torch.get_num_threads() == 1
        for count in ("0", "9223372036854775808"):  # the second is greater than a C integer
            result = regard("translate", trained, "--threads", count, "b a")
            assert result.status == 2 and "--threads" in result.err
    finally:
        torch.set_num_threads(before)

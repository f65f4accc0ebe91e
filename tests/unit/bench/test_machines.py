"""What is said where hosts, or several ranks on one GPU, cannot be had."""

import os
import shutil
import stat

import pytest

from nestpipe.bench import machines
from nestpipe.bench.machines import bits_per_s, mps_daemon, shaped_hosts, why_not
from nestpipe.errors import ConfigError


def test_a_missing_program_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    with (
        pytest.raises(ConfigError, match="tc not found; install iproute2"),
        shaped_hosts(2, "1mbit"),
    ):
        pass


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(machines.os, "geteuid", lambda: 1000)
    reason = why_not()
    assert reason is not None
    assert "needs root" in reason


@pytest.mark.parametrize("rate", ["fast", "200", "1kbit", "200 mbit", "-1mbit", "900gbit", ""])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ConfigError, match="write a speed from 100kbit to 100gbit"):
        bits_per_s(rate)


def test_rates():
    assert bits_per_s("1.5gbit") == 1.5e9
    assert bits_per_s("200mbit") == 2e8


def test_too_many_hosts_are_refused():
    with pytest.raises(ConfigError, match="1000 hosts cannot be made"), shaped_hosts(1000, "1mbit"):
        pass


def test_mps_runs_only_inside_and_in_folders_of_its_own(tmp_path, monkeypatch):
    said = tmp_path / "said"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        f'#!/bin/sh\n[ "$1" = -d ] && echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {said} && exit\n'
        f'read word; echo "$word $CUDA_MPS_PIPE_DIRECTORY" >> {said}\n'
    )
    control.chmod(control.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    # The guard refuses programs of the machine; this one is written by the test.
    monkeypatch.setenv("NESTPIPE_TEST_PROGRAMS", control.name)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with mps_daemon():
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert said.read_text() == f"start {folder}\n"
    assert said.read_text() == f"start {folder}\nquit {folder}\n"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_without_mps_it_says_so_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with mps_daemon():
        pass
    assert "nvidia-cuda-mps-control not found" in capsys.readouterr().err

"""Rows on their way between GPU and host: what can be said of it without a GPU."""

import os
import stat
from pathlib import Path

import pytest
import torch

from nestpipe.kernels import build as building
from nestpipe.kernels.build import CannotCompileError, build_cuda, find_nvcc
from nestpipe.kernels.library import cuda_library
from nestpipe.kernels.rows import cuda as row_copies
from nestpipe.kernels.rows.cuda import (
    WHOLE,
    aligned_rows,
    can_copy_in_bulk,
    in_order_of_addresses,
)

CPU = torch.device("cpu")
COMPILER = """#!/bin/sh
# Says its version, and writes its arguments where it is told to.
[ "$1" = --version ] && exec echo 1.0
{then}
while [ "$1" != -o ]; do shift; done
echo "$@" > "$2"
"""


@pytest.fixture
def nvcc(monkeypatch, tmp_path):
    """Makes a compiler that does something else first; it is the only one."""

    def make(then: str = "") -> Path:
        path = tmp_path / "cuda" / "bin" / "nvcc"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(COMPILER.format(then=then))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("NESTPIPE_CACHE", str(tmp_path / "cache"))
    return make


@pytest.fixture
def big_gpu(monkeypatch):
    """As if there were one with bulk copies."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda_library.cache_clear()
    yield
    cuda_library.cache_clear()


@pytest.mark.parametrize("width", [1, 3, 4, 65, 129, 192])
def test_every_row_starts_where_a_bulk_copy_can(width):
    rows_KW = aligned_rows(5, width, CPU)
    assert rows_KW.shape == (5, width)
    assert rows_KW.stride(0) * 4 % WHOLE == 0
    assert width <= rows_KW.stride(0) < width + WHOLE // 4


def test_rows_are_taken_in_the_order_of_where_they_live():
    addresses_K = torch.tensor([700, 100, 500, 300])
    assert in_order_of_addresses(addresses_K, None).tolist() == [1, 3, 2, 0]
    assert in_order_of_addresses(addresses_K, torch.tensor([0, 2, 1])).tolist() == [1, 2, 0]
    assert in_order_of_addresses(addresses_K, torch.tensor([3])).tolist() == [3]


def test_the_compiler_runs_once(nvcc, capsys, tmp_path):
    nvcc()
    library = build_cuda()
    assert "row_copy_tma.o" in library.read_text()
    said = capsys.readouterr().err
    assert said.startswith(f"compiling the GPU kernels with {nvcc()}: a minute or two, once")
    assert said.endswith(f"they are kept in {str(tmp_path / 'cache')!r}\n")
    assert build_cuda() == library
    assert capsys.readouterr().err == ""


def test_a_library_that_another_stage_has_built_needs_no_compiler(nvcc, monkeypatch, tmp_path):
    compiler = nvcc()
    library = build_cuda()
    compiler.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(building, "USUAL_NVCC", tmp_path / "none")
    assert build_cuda() == library
    library.write_text("damaged")
    with pytest.raises(CannotCompileError, match="nvcc is not installed"):
        build_cuda()


def test_another_source_is_another_library(nvcc, monkeypatch, tmp_path):
    nvcc()
    first = build_cuda()
    (tmp_path / "one.cu").write_text("// nothing")
    monkeypatch.setattr(building, "CUDA_SOURCES", tmp_path)
    assert build_cuda() != first


def test_nvcc_is_looked_for_in_three_places(nvcc, monkeypatch, tmp_path):
    own = nvcc()
    assert find_nvcc() == own
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(own.parent), prepend=os.pathsep)
    assert find_nvcc() == own
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(building, "USUAL_NVCC", own)
    assert find_nvcc() == own
    monkeypatch.setattr(building, "USUAL_NVCC", tmp_path / "none")
    with pytest.raises(CannotCompileError, match="CUDA_HOME"):
        find_nvcc()


def test_where_nothing_can_be_compiled_rows_take_the_other_way_and_it_is_said_once(nvcc, big_gpu):
    nvcc("echo 'row_copy_tma.cu(1): error: no such thing' >&2; exit 1")
    rows_KW = aligned_rows(5, 8, CPU)
    with pytest.warns(UserWarning, match=r"slower kernels.*no such thing"):
        assert not can_copy_in_bulk(rows_KW)
    assert not can_copy_in_bulk(rows_KW)


def test_rows_that_do_not_fit_bulk_copies_take_the_other_way(monkeypatch):
    monkeypatch.setattr(row_copies, "cuda_library", lambda device: object())
    assert can_copy_in_bulk(aligned_rows(3, 65, CPU))
    assert not can_copy_in_bulk(torch.empty(3, 65))
    assert not can_copy_in_bulk(aligned_rows(3, 65, CPU)[:, 1:])
    assert not can_copy_in_bulk(aligned_rows(2, row_copies.MOST_BYTES // 4 + 1, CPU))


def test_a_gpu_without_bulk_copies_has_the_other_way(monkeypatch):
    cuda_library.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not can_copy_in_bulk(aligned_rows(3, 64, CPU))
    cuda_library.cache_clear()

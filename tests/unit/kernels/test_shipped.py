"""A wheel's libraries: chosen by processor and sources, and with the bits of one built here."""

import ctypes
import hashlib
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nestpipe.config import Table
from nestpipe.data import DataConfig, SyntheticConfig, open_source
from nestpipe.embedding.optimizers import OPTIMIZERS
from nestpipe.errors import ConfigError
from nestpipe.kernels import build as building
from nestpipe.kernels import library as loading
from nestpipe.models import Dlrm, DlrmConfig
from nestpipe.train import PipelineSettings, RowSettings, Trainer, TrainSettings
from support.examples import is_long
from support.warm_python import REAL

ONE = 'extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n'
X86 = {level: {*flags, "fpu"} for level, flags in building.LEVELS["x86_64"].items()}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sources that compile at once, and an empty folder for what a wheel would have."""
    sources, shipped = tmp_path / "native", tmp_path / "shipped"
    sources.mkdir()
    shipped.mkdir()
    (sources / "one.cpp").write_text(ONE)
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return shipped


def has(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(building, "_processor", lambda: f"flags\t\t: {' '.join(X86[level])}")


def put(folder: Path, *levels: str) -> None:
    for level in levels:
        (folder / building.shipped_name("x86_64", level)).touch()


def test_the_best_library_that_a_processor_can_run_is_taken(small, monkeypatch):
    put(small, "avx512", "avx2", "baseline")
    for level in ("avx512", "avx2", "baseline"):
        has(monkeypatch, level)
        found = building.shipped(small)
        assert found is not None
        assert found.name == building.shipped_name("x86_64", level)


def test_no_library_is_taken_that_a_processor_cannot_run(small, monkeypatch):
    put(small, "avx512", "avx2")
    has(monkeypatch, "baseline")
    assert building.shipped(small) is None
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert building.shipped(small) is None


def test_a_library_of_other_sources_is_not_taken(small, monkeypatch):
    put(small, "baseline")
    has(monkeypatch, "avx2")
    assert building.shipped(small) is not None
    (building.SOURCES / "one.cpp").write_text("// changed\n")
    assert building.shipped(small) is None


def test_a_shipped_library_needs_no_cpp_runtime_of_the_machine(small):
    if sys.platform != "linux" or not _can_run("baseline"):
        pytest.skip("this machine cannot load it")
    path = building.build_shipped(building.find_compiler(), "x86_64", "baseline", small)
    assert ctypes.CDLL(str(path)).one() == 1
    assert b"libstdc++.so" not in path.read_bytes()


@pytest.mark.parametrize(("setting", "shipped"), [("1", True), ("build", False)])
def test_the_environment_chooses_between_the_wheel_and_a_compiler(
    monkeypatch: pytest.MonkeyPatch, setting: str, shipped: bool
):
    monkeypatch.setattr(loading, "shipped", lambda: Path("/shipped.so"))
    monkeypatch.setattr(loading, "build", lambda: Path("/built.so"))
    monkeypatch.setenv("NESTPIPE_NATIVE", setting)
    assert loading.find() == Path("/shipped.so" if shipped else "/built.so")
    assert loading.native_wanted()


def test_a_wheel_without_a_library_is_built_on_first_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "shipped", lambda: None)
    monkeypatch.setattr(loading, "build", lambda: Path("/built.so"))
    assert loading.find() == Path("/built.so")


def test_an_unknown_setting_names_the_three(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NESTPIPE_NATIVE", "wheel")
    with pytest.raises(ConfigError, match=r"'wheel'; set 0 .* 1 .* or build"):
        loading.find()


def test_what_builds_wheels_does_without_torch():
    code = "import sys, nestpipe.kernels.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([REAL, "-c", code], check=False).returncode == 0


# The same bits from every library.


def _can_run(level: str) -> bool:
    flags = set(building._processor().replace(":", " ").split())
    levels = building.LEVELS.get(platform.machine(), {})
    return level in levels and flags.issuperset(levels[level])


@pytest.fixture
def library_of(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Makes the library of a level the one that all code uses; None: that of this processor."""

    def use(level: str | None) -> None:
        path = building.build() if level is None else _kept(level)
        monkeypatch.setattr(loading, "find", lambda: path)
        loading.library.cache_clear()
        assert loading.library()._name == str(path)

    yield use
    loading.library.cache_clear()


def _kept(level: str) -> Path:
    """Compiled once per machine, as other libraries are."""
    compiler, machine = building.find_compiler(), platform.machine()
    folder = building.cache_folder() / f"shipped-{building.build_key(compiler)}"
    path = folder / building.shipped_name(machine, level)
    with building.locked(folder / f"{level}.lock"):
        return path if path.is_file() else building.build_shipped(compiler, machine, level, folder)


def trained(optimizer: str) -> str:
    """A hash of all rows and dense weights after some batches of sums, lists and small floats."""
    world = SyntheticConfig(samples=1_500, num_tables=4)
    tables = [
        Table(name=f"c{n}", dim=dim, pooling="sum", init_std=0.1, dtype=dtype)  # type: ignore[arg-type]
        for n, (dim, dtype) in enumerate(
            [(8, "float32"), (8, "bfloat16"), (8, "float16"), (8, "float32")]
        )
    ]
    settings = TrainSettings(
        batch=128,
        rows=RowSettings(optimizer=optimizer, weight_decay=0.01),  # type: ignore[arg-type]
        pipeline=PipelineSettings(plan="nested", micro_batches=3, micro_batching="clustered"),
    )
    torch.manual_seed(0)
    model = Dlrm(DlrmConfig(features=("c0", "c1", "c2", "c3"), dim=8, bottom=(8,), top=(8,)))
    trainer = Trainer(model, tables, settings)
    trainer.fit(open_source(DataConfig(synthetic=world)))
    digest = hashlib.sha256()
    for table in tables:
        rows = trainer.rows_of(table.name, torch.arange(2_000))
        digest.update(rows.contiguous().numpy().tobytes())
    for weights in model.parameters():
        digest.update(weights.detach().numpy().tobytes())
    trainer.close()
    return digest.hexdigest()


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_a_shipped_library_trains_to_the_bits_of_one_built_here(library_of, level: str):
    if not _can_run(level):
        pytest.skip(f"this processor is not {level}")
    if level != "baseline" and not is_long():
        pytest.skip("nearer to one built here; NESTPIPE_EXAMPLES=long compares it too")
    library_of(None)
    here = {optimizer: trained(optimizer) for optimizer in OPTIMIZERS}
    assert len(set(here.values())) > 3, "the optimizers differ"
    library_of(level)
    assert {optimizer: trained(optimizer) for optimizer in OPTIMIZERS} == here

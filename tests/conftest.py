import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from support import programs
from support.examples import is_long, load_profile
from support.warm_python import in_place_of_python, warm_process

# A child that a signal ends shows where its threads were.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

load_profile()

GOLDEN = Path(__file__).parent / "golden"
WRITE = "NESTPIPE_GOLDEN=write pytest tests -k golden"


def pytest_configure(config: pytest.Config) -> None:
    """Children of tests import `sitecustomize`, which refuses programs without a marker."""
    programs.install_guard()
    if not is_long() and not hasattr(config, "workerinput"):  # workers share that of their run
        warm = ExitStack()
        warm.enter_context(warm_process())
        config.add_cleanup(warm.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Of several workers let one compile the tests; the others read what it has written.

    Modules and tests stay until the end, so no garbage collection need look at them.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    alone = nullcontext()
    if run is not None and not sys.dont_write_bytecode:
        alone = _first_alone(Path(tempfile.gettempdir()) / f"nestpipe-tests-{run}")
    gc.disable()
    try:
        with alone:
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _first_alone(file: Path) -> Iterator[None]:
    """The first process to enter is alone inside; all others enter once it has left."""
    with file.open("a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.fstat(held.fileno()).st_size > 0:  # the first has left
            fcntl.flock(held, fcntl.LOCK_UN)
            yield
            return
        try:
            yield
        finally:
            held.write("first")
            held.flush()
            file.unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Skip a test that needs a missing program; let the others start what they name."""
    import torch  # not in the process that only hands tests to workers

    # Tests run side by side; threads of one op that wait for a core cost far more than they save.
    # Before every test, since the one before may have run a command that sets another number.
    torch.set_num_threads(1)
    needed = programs.needed_by(item)
    if needed and (reason := programs.reason_to_skip(needed)) is not None:
        item.add_marker(pytest.mark.skip(reason=reason))
    with programs.allowed(needed):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def warm_python() -> Iterator[None]:
    """Processes of tests begin with torch imported; in the long profile, with nothing."""
    with in_place_of_python():
        yield


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name, or write the file where that is asked."""

    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if os.environ.get("NESTPIPE_GOLDEN") == "write":
            GOLDEN.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"tests/golden/{name} is missing; write it with\n  {WRITE}"
        assert text.splitlines() == file.read_text(encoding="utf-8").splitlines(), (
            f"tests/golden/{name} differs; if the change is meant, rewrite it with\n  {WRITE}\n"
            "and read the diff"
        )

    return compare

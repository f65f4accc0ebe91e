"""A fork of the warm process does what a new interpreter would do."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from support import warm_python
from support.warm_python import REAL

PYTHONS = pytest.mark.parametrize("warm", [True, False], ids=["warm", "real"])


@pytest.fixture
def python(warm: bool, request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("stand_in") if warm else REAL


@pytest.fixture
def stand_in() -> str:  # not `warm_python`: that fixture of the session would not run here then
    if sys.executable == REAL:
        pytest.skip("processes of tests are interpreters of their own here")
    return sys.executable


def run(python: str, *arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [python, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]


def test_a_fork_has_torch_from_its_beginning():
    said = run(sys.executable, "-c", "import sys; print('torch' in sys.modules)").stdout
    assert said == f"{sys.executable != REAL}\n"


@PYTHONS
def test_arguments_environment_and_folder_arrive(python: str, tmp_path: Path):
    program = tmp_path / "program.py"
    words = "import os, sys; print(sys.argv[1:], sys.path[0], os.getcwd(), os.environ['X'])"
    program.write_text(f"{words}\nif __name__ == '__main__': print(__file__)")
    place = tmp_path / "place"
    place.mkdir()
    done = run(python, str(program), "-c", "two", cwd=place, env={**os.environ, "X": "3"})
    assert done.stdout == f"['-c', 'two'] {tmp_path} {place} 3\n{program}\n", done.stderr
    (place / "named.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert run(python, "-m", "named", "1", cwd=place).stdout == "__main__ ['1']\n"
    inner = "import sys; print(sys.argv, repr(sys.path[0]))"
    assert run(python, "-c", inner, "1", cwd=place).stdout == "['-c', '1'] ''\n"


@PYTHONS
@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('so')", 1, "so\n"),
        ("raise ValueError('no')", 1, "ValueError: no\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'end')", 0, "end"),
    ],
)
def test_it_ends_alike(python: str, program: str, status: int, said: str):
    done = run(python, "-c", program)
    assert done.returncode == status
    assert done.stderr.endswith(said)


@PYTHONS
def test_open_files_are_inherited(python: str):
    reading, writing = os.pipe()
    run(python, "-c", f"import os; os.write({writing}, b'hello')", pass_fds=[writing])
    os.close(writing)
    with open(reading) as heard:  # noqa: PTH123 - it has no path
        assert heard.read() == "hello"


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
while True:
    time.sleep(0.01)  # `signal.pause` sleeps over a signal that comes just before it
"""


@PYTHONS
def test_a_signal_that_a_shell_ignores_reaches_who_listens(python: str):
    """Jobs in the background of a shell ignore SIGINT until they say otherwise."""
    listens = WAITS.replace("SIGTERM", "SIGINT")
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", python, "-c", listens]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 5


@PYTHONS
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 5), (signal.SIGKILL, -9)])
def test_a_signal_reaches_it(python: str, number: signal.Signals, status: int):
    with subprocess.Popen([python, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == status
    for _ in range(600):  # a fork outlives the one who is killed in its place by a moment
        if not Path(f"/proc/{pid}").exists():
            return
        threading.Event().wait(0.1)
    pytest.fail("it still runs")


def test_a_signal_reaches_it_before_its_front_has_seen_that_it_runs(stand_in: str):
    """Here the test is the warm process, and says late which process the fork is."""
    with (
        tempfile.TemporaryDirectory(prefix="nestpipe-front-") as place,
        socket.socket(socket.AF_UNIX) as listener,
        subprocess.Popen([REAL, "-c", WAITS], stdout=subprocess.PIPE, text=True) as fork,
    ):
        client = warm_python._client_in(Path(place))
        listener.bind(f"{place}/socket")
        listener.listen()
        assert fork.stdout is not None
        fork.stdout.readline()  # it listens now
        with subprocess.Popen([client, "-c", "pass"]) as front, listener.accept()[0] as link:
            _, files = warm_python._received(link)
            for file in files:
                os.close(file)
            front.send_signal(signal.SIGTERM)
            warm_python._tell(link, fork.pid)
            try:
                assert fork.wait(20) == 5
                warm_python._tell(link, 5)
                assert front.wait(20) == 5
            finally:
                fork.kill()


def test_what_a_fork_cannot_be_is_an_interpreter_of_its_own():
    program = "import sys; print(sys.flags.isolated, sys.flags.hash_randomization)"
    assert run(sys.executable, "-I", "-c", program).stdout == "1 1\n"
    seeded = {**os.environ, "PYTHONHASHSEED": "0"}
    assert run(sys.executable, "-c", program, env=seeded).stdout == "0 0\n"

"""Refuse programs that the running test does not name; Python imports this when it starts.

Audit hooks cannot be removed, so the hook reads the environment at every call and does nothing
where no test runs. Imports are few, since every Python process of the tests pays for them.
"""

import os
import sys

STARTS = {"subprocess.Popen": 0, "os.exec": 0, "os.posix_spawn": 0, "os.spawn": 1}
"""Events that start a program, and which argument names it."""
SYSTEM = (".", "/usr/local/sbin", "/usr/sbin", "/sbin")
TOOLCHAIN = (
    r"(python|pypy)[\d.]*|(ba)?sh|true"
    r"|([\w.]+-)*(c\+\+|g\+\+|gcc|cc|clang(\+\+)?|ld|nvcc|ptxas)(-[\d.]+)?"
    r"|ldconfig|uname|git|file|openssl"  # the standard library and torch ask these, and do without
)


def _refuse_unnamed(event: str, arguments: tuple[object, ...]) -> None:
    place = STARTS.get(event)
    allowed = os.environ.get("NESTPIPE_TEST_PROGRAMS")
    if place is None or allowed is None:
        return
    import re
    from pathlib import Path

    path = Path(os.fsdecode(arguments[place]))  # type: ignore[arg-type]
    if path.name in allowed.split(",") or re.fullmatch(TOOLCHAIN, path.name):
        return
    searched = {*os.environ.get("PATH", os.defpath).split(os.pathsep), *SYSTEM}
    if str(path.parent) in searched - {str(Path(sys.executable).parent)}:
        raise AssertionError(f'a test starts {path.name}; mark it needs("{path.name}")')


sys.addaudithook(_refuse_unnamed)

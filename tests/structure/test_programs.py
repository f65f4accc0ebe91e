"""No test starts a program that a fresh machine may lack, unless it says so and can be skipped."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import programs

CI = Path(__file__).parents[2] / ".ci/run"
FROM_A_CHILD = "import subprocess; subprocess.run(['nginx', '-v'])"


def test_a_program_without_a_marker_is_refused():
    with pytest.raises(AssertionError, match=r'a test starts nginx; mark it needs\("nginx"\)'):
        subprocess.run(["/usr/sbin/nginx", "-v"], check=False)


def test_a_program_started_by_a_child_is_refused():
    command = [sys.executable, "-c", FROM_A_CHILD]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "a test starts nginx; mark it" in done.stderr


def test_a_named_program_may_be_started():
    started = [sys.executable, "-c", "import subprocess; subprocess.run(['taskset', '--version'])"]
    with programs.allowed(("taskset",)):
        done = subprocess.run(started, capture_output=True, text=True, check=False)
    assert "mark it" not in done.stderr


def test_what_a_test_has_built_may_be_started(tmp_path: Path):
    program = tmp_path / "built"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "hello\n"


def test_a_missing_program_skips_with_the_package_that_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "NGINX_PATH", str(tmp_path))
    reason = programs.reason_to_skip(("nginx", "tc"))
    assert reason == "nginx, tc not installed; apt-get install iproute2 nginx-light"


@pytest.mark.parametrize("package", sorted(set(programs.PACKAGES.values())))
def test_the_automatic_run_installs_what_tests_need(package: str):
    assert package in CI.read_text().split()

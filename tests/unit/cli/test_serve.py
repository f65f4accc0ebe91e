"""`nestpipe serve` with wrong input: one sentence, status 2, nothing started."""

from pathlib import Path

import pytest

from nestpipe.cli.app import main
from nestpipe.serve.http.worker import bind_port


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NESTPIPE_TOKEN", raising=False)
    folder = tmp_path / "run" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *map(str, arguments)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "target=5"], "did you mean target_ms"),
        (["--set", "target_ms=-1"], "target_ms is -1"),
        (["--set", "target_ms"], "cannot set"),
        (["--set", "http.request=5"], "did you mean requests"),
        (["--set", "http.requests=0"], "http.requests is 0"),
        (["--set", "http=5"], "http is 5"),
        (["--instances", "0"], "cannot start 0 instances"),
        (["--instances", "many"], "--help"),
        (["--port", "70000"], "port is 70000"),
        (["--router", "haproxy"], "haproxy"),
        (["--host", "0.0.0.0"], "NESTPIPE_TOKEN"),
        (["--host", "not a host", "--router", "none"], "NESTPIPE_TOKEN"),
        (["--token-file", "nothing-here"], "cannot read a token"),
        (["--histories", "nothing-here"], "no file 'nothing-here'"),
        (["--dtype", "int8"], "int8"),
    ],
)
def test_a_wrong_option_is_named(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, options: list[str], says: str
):
    assert says in refused(capsys, checkpoint, *options)


def test_a_checkpoint_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert "no checkpoint" in refused(capsys, tmp_path / "nothing")
    assert "holds no checkpoint" in refused(capsys, tmp_path)
    (tmp_path / "file").write_text("hello")
    assert "no folder" in refused(capsys, tmp_path / "file")


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    with bind_port("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(capsys, checkpoint, "--port", port)
        one_before = port - 1
        said = refused(capsys, checkpoint, "--port", one_before)
        assert "cannot listen" in said  # the first instance has the port after the router's


def test_a_short_token_is_not_taken(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NESTPIPE_TOKEN", "secret")
    said = refused(capsys, checkpoint)
    assert "16 characters" in said
    assert "secret" not in said


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--help"])
    assert stop.value.code == 0
    assert "Example: nestpipe serve runs/ranker" in capsys.readouterr().out

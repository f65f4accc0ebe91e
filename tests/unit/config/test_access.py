from pathlib import Path

import pytest

from nestpipe.config.sections import is_authorised, is_loopback, read_token, require_token
from nestpipe.errors import ConfigError

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1"])
def test_this_machine_alone_needs_no_token(host: str):
    assert is_loopback(host)
    require_token(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_what_others_can_reach_needs_a_token(host: str):
    with pytest.raises(ConfigError, match="NESTPIPE_TOKEN"):
        require_token(host, None)
    require_token(host, TOKEN)


@pytest.mark.parametrize(
    ("header", "right"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer {TOKEN}", True),
        (f"Basic {TOKEN}", False),
        (f"Bearer {TOKEN}x", False),
        ("Bearer ", False),
        ("Bearer", False),
        (TOKEN, False),
        ("", False),
        ("Bearer ü", False),
    ],
)
def test_only_the_token_lets_a_caller_in(header: str, right: bool):
    assert is_authorised(header.encode(), TOKEN) is right
    assert is_authorised(header.encode(), None)


def test_no_header_is_no_token():
    assert not is_authorised(None, TOKEN)


def test_a_file_goes_before_the_environment(tmp_path: Path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert read_token(tmp_path / "token", {"NESTPIPE_TOKEN": "x" * 20}) == TOKEN
    assert read_token(None, {"NESTPIPE_TOKEN": "x" * 20}) == "x" * 20
    assert read_token(None, {}) is None


@pytest.mark.parametrize("text", ["", "tiny", "with a\nline break in it", "ü" * 20])
def test_a_token_that_is_none_is_refused_without_being_shown(tmp_path: Path, text: str):
    (tmp_path / "token").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_token(tmp_path / "token", {})
    assert not text or text not in str(refused.value)


def test_a_token_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="readable"):
        read_token(tmp_path / "nothing", {})

"""The configuration for nginx says what was asked, and nothing that was not checked."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import ConfigError
from nestpipe.serve.http.launch import nginx_config

TWO = ["127.0.0.1:9001", "127.0.0.1:9002"]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def test_users_are_hashed_consistently_over_all_instances():
    text = lines(nginx_config([*TWO, "ranker-3.example:80", "[::1]:9004"], "0.0.0.0:8080"))
    assert "hash $http_x_user consistent;" in text
    assert "listen 0.0.0.0:8080;" in text
    for place in (*TWO, "ranker-3.example:80", "[::1]:9004"):
        assert text.count(f"server {place} max_fails=2 fail_timeout=1s;") == 2
    assert text.index("hash $http_x_user consistent;") < text.index("keepalive 64;")


def test_a_ranking_is_tried_at_every_instance():
    text = nginx_config(["a:1", "b:1", "c:1"])
    rank = text[text.index("location = /v1/rank") :]
    assert "proxy_next_upstream error timeout http_503 non_idempotent;" in rank
    assert "proxy_next_upstream_tries 3;" in rank


@pytest.mark.parametrize(
    ("key", "variable", "place"),
    [
        ("header X-User", "$http_x_user", "header X-User"),
        ("header My-Own-Id", "$http_my_own_id", "header My-Own-Id"),
        ("query user", "$arg_user", "query user"),
    ],
)
def test_the_user_stands_where_it_is_said(key: str, variable: str, place: str):
    text = nginx_config(TWO, key=key)
    assert f"hash {variable} consistent;" in text
    assert text.count(f'if ({variable} = "")') == 2
    assert f"give the {place}" in text


def test_numbers_reach_their_places():
    text = lines(
        nginx_config(
            TWO, keepalive=7, connect_s=0.1, answer_s=2.5, client_s=3, max_fails=5, fail_s=9,
            body_mb=0.5,
        )
    )  # fmt: skip
    for line in (
        "keepalive 7;",
        "proxy_connect_timeout 100ms;",
        "proxy_read_timeout 2500ms;",
        "client_body_timeout 3s;",
        "server 127.0.0.1:9001 max_fails=5 fail_timeout=9s;",
        "client_max_body_size 512k;",
        "client_body_buffer_size 512k;",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"instances": []}, "there are no instances to route to; give at least one host:port"),
        ({"instances": ["a:1", "a:01"]}, "instance a:1 is named twice; name each once"),
        (
            {"instances": ["a:1; } evil {"]},
            "instance 'a:1; } evil {' is not host:port; write for example 127.0.0.1:9001",
        ),
        (
            {"listen": "8080"},
            "listen '8080' is not host:port; write for example 127.0.0.1:9001",
        ),
        (
            {"key": "header X-User; evil"},
            "key 'header X-User; evil' is no place of a request; write header NAME or query NAME",
        ),
        (
            {"key": "cookie u"},
            "key 'cookie u' is no place of a request; write header NAME or query NAME",
        ),
        ({"answer_s": 0}, "answer_s is 0; give a number above 0"),
        ({"body_mb": float("inf")}, "body_mb is inf; give a number of at most 65536"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(arguments, sentence: str):
    with pytest.raises(ConfigError) as error:
        nginx_config(**{"instances": TWO, **arguments})
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    "place",
    [
        "", ":", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "a:+1", "a:1 ", " a:1", "a:1\n",
        "a b:1", "a;b:1", "$host:1", "a{}:1", "-a:1", "a-:1", "a..b:1", "256.1.1.1:1", "1.2.3:1",
        "::1:80", "[::1:80", "[fe80::1%eth0]:1", "[a]:1", "unix:/tmp/x:1", "a/b:1", "ü:1",
        "a:\u0661", "x" * 254 + ":1",
    ],
)  # fmt: skip
def test_what_is_not_host_and_port_is_refused(place: str):
    with pytest.raises(ConfigError, match="is not host:port"):
        nginx_config([place])


@given(text=st.text(max_size=30))
def test_no_text_gets_into_the_file_unchecked(text: str):
    """Whatever is accepted consists of harmless characters."""
    for arguments in ({"instances": [text]}, {"listen": text}, {"key": text}):
        try:
            nginx_config(**{"instances": TWO, **arguments})
        except ConfigError:
            continue
        assert re.fullmatch(r"[A-Za-z0-9.:\[\]_ -]+", text)

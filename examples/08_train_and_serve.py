"""Train a ranker, serve it over HTTP, and rank candidates in two legs.

    python examples/08_train_and_serve.py

The first leg sends a user's long history as soon as the user is known. The service computes its
keys and values while candidates are still being retrieved. The second leg brings the newest events
and the candidates, and gets the scores that one full pass would give.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

NESTPIPE = [sys.executable, "-m", "nestpipe"]
SETTINGS = {
    "model.kind": "ranker",
    "data.synthetic.flavour": "sequence",
    "data.synthetic.samples": 1_500,
    "data.synthetic.test_samples": 300,
    "data.synthetic.num_items": 1_000,
    "model.dim": 16,
    "model.negatives": 16,
    "run.batch": 128,
    "run.device": "cpu",
    "rows.lr": 0.1,
    "dense.lr": 0.003,
}


def train(folder: Path) -> None:
    """Train for a few seconds; the checkpoint says all that serving needs."""
    settings = SETTINGS | {"run.checkpoint": folder}
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    subprocess.run([*NESTPIPE, "train", *flags], check=True)


def wait_for_address(service: subprocess.Popen[str]) -> str:
    """The service says where it is once every instance is ready."""
    assert service.stderr is not None
    for line in service.stderr:
        print(line, end="")
        if line.startswith("serving at "):
            return line.split()[-1]
    raise SystemExit("the service ended before it was ready")


def post(url: str, user: str, body: dict[str, object]) -> dict[str, object]:
    """Send JSON. `X-User` lets a router choose the instance without reading the body."""
    headers = {"Content-Type": "application/json", "X-User": user}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def rank_in_two_legs(address: str) -> None:
    """The long history first, the newest events with the candidates later."""
    history = list(range(1, 41))
    signal = {"user": "u42", "history": {"items": history}}
    print("signal:", post(f"{address}/v1/prefetch", "u42", signal))

    request = {
        "user": "u42",
        "long": {"items": history},
        "short": {"items": [41, 42]},
        "candidates": [7, 43, 900],
        "deadline_ms": 10_000,
    }
    print("ranking:", post(f"{address}/v1/rank", "u42", request))


with tempfile.TemporaryDirectory() as folder:
    train(Path(folder))
    command = [*NESTPIPE, "serve", folder, "--instances", "1", "--port", "0", "--device", "cpu"]
    # Admission control prepares only rankings that might miss their target. This model is so small
    # that none would, so it is off here.
    command += ["--set", "admission=false"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        try:
            rank_in_two_legs(wait_for_address(service))
        finally:
            service.terminate()  # SIGTERM drains: accepted requests are still answered
            service.communicate()

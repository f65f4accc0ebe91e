"""`nestpipe serve`: router and instances of a trained model, with one command."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nestpipe.config import build, override
from nestpipe.errors import CheckpointError, ConfigError

MOST_INSTANCES = 64

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting, e.g. target_ms=20; may be repeated."
    ),
]
HistoriesFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Parquet or npz file of user histories, so that requests may leave them out.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with the token of callers, or set NESTPIPE_TOKEN; needed beyond loopback.",
    ),
]


def serve(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a folder: the newest that verifies.")
    ],
    instances: Annotated[
        int, typer.Option(help="Number of instances, each a process with the model.")
    ] = 2,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port of the service; instances take those after it. 0: any.")
    ] = 8900,
    router: Annotated[
        Literal["builtin", "nginx", "none"],
        typer.Option(help="Router that sends both legs of a user to the same instance."),
    ] = "builtin",
    settings: Assignments = None,
    histories: HistoriesFile = None,
    token_file: TokenFile = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Data type of weights and cached prefixes."),
    ] = "float32",
) -> None:
    """Serve a trained model over HTTP until SIGTERM or Ctrl-C.

    A ranker is asked in two legs; a DLRM, or a model of your own with `score`, in one. SIGHUP
    reloads the latest checkpoint of the folder.

    Example: nestpipe serve runs/ranker --instances 2 --port 8900 --set target_ms=20

    Example: nestpipe serve runs/clicks --set candidate_feature=item
    """
    _check(checkpoint, instances, port, histories)
    _require("torch", "safetensors", "fastapi", "httpx", "prometheus_client", "uvicorn")
    from nestpipe.config.sections import read_token, require_token
    from nestpipe.serve.http import launch

    token = read_token(token_file, os.environ)
    require_token(host, token)
    role = _role(settings or []) | {"host": host, "port": port, "device": device, "dtype": dtype}
    role |= {"checkpoint": str(checkpoint), "histories": str(histories) if histories else None}
    service = launch.Service(
        instance=build(launch.Role, role), instances=instances, router=router, token=token
    )
    raise typer.Exit(launch.serve(service, _say))


def _require(*modules: str) -> None:
    """Say at once what every instance would miss."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(
                f"serving needs {module}, which is not installed; "
                "pip install 'nestpipe[serve,train]'"
            )


def _role(assignments: list[str]) -> dict[str, Any]:
    """`target_ms=20` is a setting of instances, `http.requests=64` one of the HTTP service."""
    given = override({}, assignments)
    http = given.pop("http", {})
    if not isinstance(http, dict):
        raise ConfigError(f"http is {http}; write --set http.requests=64 and the like")
    return {"kind": "instance", "settings": given, "http": http}


def _check(checkpoint: Path, instances: int, port: int, histories: Path | None) -> None:
    """Refuse at once what could only fail after a while."""
    if not checkpoint.exists():
        raise CheckpointError(f"there is no checkpoint '{checkpoint}'; check its name")
    if not checkpoint.is_dir():
        raise CheckpointError(f"'{checkpoint}' is no folder; name a checkpoint's folder")
    is_one = any((checkpoint / name).exists() for name in ("manifest.json", "run.json"))
    if not is_one and not any(checkpoint.glob("step-*")):
        raise CheckpointError(
            f"'{checkpoint}' holds no checkpoint; name a folder `step-...` or one that has some"
        )
    if not 1 <= instances <= MOST_INSTANCES:
        raise ConfigError(f"cannot start {instances} instances; ask for 1 to {MOST_INSTANCES}")
    if not 0 <= port <= 65535 - instances:
        raise ConfigError(f"port is {port}; give 1 to {65535 - instances}, or 0 for any")
    if histories is not None and not histories.is_file():
        raise ConfigError(f"there is no file '{histories}' of histories; check its name")


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()

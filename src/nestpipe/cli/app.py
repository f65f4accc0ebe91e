"""The program `nestpipe`: its commands, and how their errors reach a person."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from functools import cache
from typing import Annotated, Any, cast

import typer
from typer.main import get_command

from nestpipe import __version__
from nestpipe.cli.bench import (
    bench_app,
    bench_checkpoint,
    bench_clustering,
    bench_dashboard,
    bench_dispatch,
    bench_dlrm,
    bench_embedding,
    bench_groups,
    bench_train,
)
from nestpipe.cli.bench_runs import bench_hstu, bench_pipeline, bench_relay
from nestpipe.cli.checkpoint import checkpoint_app, export, import_weights
from nestpipe.cli.data import bench_data, data_app
from nestpipe.cli.draw import check, draw, show
from nestpipe.cli.plan import bench_plan, bench_simulate, plan_job
from nestpipe.cli.serve import load, serve
from nestpipe.cli.simulate import simulate_app
from nestpipe.cli.train import evaluate, train, verify
from nestpipe.dashboard.server import with_address
from nestpipe.deprecated import RenamedWarning, current_flags
from nestpipe.errors import NestpipeError, RunError, speaker

app = typer.Typer(
    help="Exact, nested pipelining for recommendation models with very large tables.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command("eval")(evaluate)
app.add_typer(checkpoint_app, name="checkpoint")
app.command()(export)
app.command("import")(import_weights)
app.command()(verify)
app.command()(load)
app.command()(show)
app.command()(draw)
app.command()(check)
app.command("plan")(plan_job)
app.add_typer(simulate_app, name="simulate")
bench_app.command("train")(bench_train)
bench_app.command("pipeline")(bench_pipeline)
bench_app.command("plan")(bench_plan)
bench_app.command("simulate")(bench_simulate)
bench_app.command("groups")(bench_groups)
bench_app.command("clustering")(bench_clustering)
bench_app.command("relay")(bench_relay)
bench_app.command("dlrm")(bench_dlrm)
bench_app.command("data")(bench_data)
bench_app.command("embedding")(bench_embedding)
bench_app.command("dispatch")(bench_dispatch)
bench_app.command("hstu")(bench_hstu)
bench_app.command("checkpoint")(bench_checkpoint)
bench_app.command("dashboard")(bench_dashboard)
app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")
app.command()(serve)

# typer carries or imports click, depending on its version; its public child leads to both.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
_FORMAT_IN_FULL = warnings.formatwarning


@app.callback(invoke_without_command=True)
def _top(  # pyright: ignore[reportUnusedFunction]
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"nestpipe {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit 0 done, 1 a check failed, 2 wrong input, 3 the run failed."""
    warnings.formatwarning = _format_warning
    if os.environ.get("RANK", "0") != "0":
        warnings.filterwarnings("ignore", category=RenamedWarning)  # rank 0 prints it
    if arguments is None:
        # Ranks that the command starts get the same arguments.
        sys.argv[1:] = arguments = with_address(current_flags(sys.argv[1:]))
    else:
        arguments = with_address(current_flags(arguments))
    status = _run(arguments)
    if "RANK" in os.environ:
        # All is closed and written; threads that the network still has can abort a slower exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


@cache
def command_tree() -> Any:
    """The commands with all their options, made once: `app` itself makes them at every call."""
    return get_command(app)


def _run(arguments: list[str]) -> int:
    speaker.command_begins()
    try:
        status = command_tree()(arguments, prog_name="nestpipe", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except NestpipeError as error:
        if speaker.may_say(error):
            _print_error(str(error))
        return error.exit_status
    except _UsageError as error:
        _print_error(_sentence(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        _print_error("stopped")
        return 130
    except BrokenPipeError:
        # The reader of our output (`| head`) has closed it; discard the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - the last place that can say how the run failed
        if sentence := _fault_of_machine(error):
            _print_error(sentence)
            return RunError.exit_status
        traceback.print_exc()
        _print_error(
            "this is a defect of nestpipe, not of your input; please report it with the above"
        )
        return 3


def _fault_of_machine(error: Exception) -> str | None:
    """The sentence for a fault of memory or disk; None for any other, which is ours."""
    # torch cannot be named here; it reports memory of the host as a plain RuntimeError.
    no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if no_memory or "can't allocate memory" in str(error):
        return "memory is full; use smaller batches or tables, more ranks, or free memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left on the disk ({error.filename}); free space or choose another"
    if isinstance(error, PermissionError):
        return f"{error.filename}: {error.strerror}; change its mode, or name another"
    return None


def _format_warning(message: Warning | str, category: type[Warning], *place: Any) -> str:
    """Print a warning of an old name as one line, any other in full."""
    if issubclass(category, RenamedWarning):
        return f"warning: {message}\n"
    return _FORMAT_IN_FULL(message, category, *place)


def _sentence(error: Exception) -> str:
    message: str = getattr(error, "format_message", error.__str__)()
    return " ".join(message.split()).rstrip(".") + "; see --help"


def _print_error(sentence: str) -> None:
    sys.stderr.write(f"error: {sentence}\n")


if __name__ == "__main__":
    main()

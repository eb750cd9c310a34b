"""The command ``epl``: a few verbs, each of which hands over to the library.

    epl launch --nproc 8 train.py --lr 1e-4       run a script on 8 devices of this machine
    epl launch --nproc 8 -m package.train         the same for a module
    epl launch --nproc 8 --trace out/t.json ...   and write a timeline of its first steps
    epl verify --nproc 4 train.py                 compare its first step with one process, print the table and end

A flag exists only for what has to be known before the script runs. The model, the strategy and every setting of EPL
belong to the script, whose own arguments are passed on untouched.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from epl.errors import EplError
from epl.launcher import LaunchOptions, launch

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows ``epl``; by default that of this process.

    Returns:
        The exit code: that of the verb; 2 for arguments that cannot be carried out, 1 for other errors of EPL.

    Example:
        >>> main(["launch", "--nproc", "2", "train.py", "--lr", "1e-4"])  # doctest: +SKIP
        0
    """
    parser = argparse.ArgumentParser(prog="epl", description="Train a PyTorch model in parallel.", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    _add_launch(verbs)
    _add_verify(verbs)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except EplError as error:
        print(f"epl {parsed.verb}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _add_launch(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "launch",
        help="run a script on several devices",
        usage="epl launch [options] script.py [arguments of the script]\n"
        "       epl launch [options] -m module [arguments of the module]",
        description="Run a script once per device, each run being one rank. Rank 0's output appears here, each rank's "
        "in a log file. If a rank fails, all end, and it is said which one and why.",
        epilog="Environment: OMP_NUM_THREADS is set to the number of cores divided by --nproc, unless it is set. "
        "LOGLEVEL=INFO shows what torch's elastic agent does.",
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline of the first training steps here")
    parser.set_defaults(run=_launch, trace=None)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="ranks on this node (default: one per accelerator, or 1)")
    add("--nnodes", type=int, metavar="N", default=1, help="number of nodes; start this command on each (default: 1)")
    add("--node-rank", type=int, metavar="R", help="number of this node, from 0")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where node 0 listens; the same on every node")
    add("--log-dir", type=Path, metavar="DIR", help="make the folder for this run's logs here (default: epl_logs)")
    add("--max-restarts", type=int, metavar="N", default=0, help="start all ranks anew this often (default: 0)")
    add("-m", dest="is_module", action="store_true", help="run a module, as `python -m` does")
    # The script and everything after it, even what looks like one of the flags above. A positional argument of its own
    # for the script would not do: argparse then takes a "--" after it for its own.
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_verify(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "verify",
        help="compare a script's first training step with one plain process",
        usage="epl verify [options] script.py [arguments of the script]",
        description="Run a script under its own plan up to its first training step, do that step on a few samples, and "
        "compare loss, global norm and every gradient with the plain model in one process. Exit code 1 if any differs.",
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.set_defaults(run=_verify)


def _verify(parsed: argparse.Namespace) -> int:
    os.environ["EPL_DEBUG_VERIFY_ONLY"] = "true"
    return _launch(parsed)


def _launch(parsed: argparse.Namespace) -> int:
    if getattr(parsed, "trace", None) is not None:
        os.environ["EPL_RUN_TRACE"] = str(parsed.trace.absolute())
    command = parsed.command
    if command[:1] == ["--"]:  # `epl launch --nproc 2 -- train.py`; argparse leaves it in place
        command = command[1:]
    _note_late_flags(command[1:])
    script, *arguments = command or [""]  # LaunchOptions reports a missing script together with what else is wrong
    options = LaunchOptions(
        script=script,
        arguments=tuple(arguments),
        is_module=parsed.is_module,
        nproc=max(1, torch.accelerator.device_count()) if parsed.nproc is None else parsed.nproc,
        nnodes=parsed.nnodes,
        node_rank=parsed.node_rank,
        rdzv_endpoint=parsed.rdzv_endpoint,
        log_dir=parsed.log_dir,
        max_restarts=parsed.max_restarts,
    )
    return launch(options)


def _note_late_flags(arguments: Sequence[str]) -> None:
    """Say so if the script is given what looks like a flag of the launcher: it may be meant for either."""
    flags = {"--nproc", "--nnodes", "--node-rank", "--rdzv-endpoint", "--log-dir", "--max-restarts", "--trace"}
    late = [word for word in arguments if word.partition("=")[0] in flags]
    if late:
        print(
            f"[epl] {', '.join(late)} after the script: passed to the script, as all that follows it. Flags of the "
            "launcher come before the script.",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())

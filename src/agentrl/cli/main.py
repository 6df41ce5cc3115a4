"""The command `agentrl`: picks the subcommand, loads only that one, and turns user errors into one line."""

import io
import os
import sys
from importlib import import_module

import agentrl

# command -> what it does; the module agentrl.cli.<command> holds `main(args: list[str]) -> int`
COMMANDS: dict[str, str] = {
    "analyze": "what training on your trajectories would waste, and what to do about it",
    "verify": "whether packing, splitting and the head are exact on your model and trajectories",
    "train": "train an agent to fix bugs, or continue a run",
    "eval": "evaluate the model of a run",
    "report": "the figures of a run as one page: what it learned, spent and saved",
    "plan": "what a run will cost: GPU-hours, memory, and what would save most",
}


def _usage() -> str:
    width = max(map(len, COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: agentrl COMMAND [OPTIONS]",
            "",
            "Train language-model agents by reinforcement learning, fast and exactly.",
            "",
            "commands:",
            *lines,
            "",
            "`agentrl COMMAND --help` lists a command's options; `agentrl --version` the version.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for wrong input, as argparse does)."""
    args = sys.argv[1:] if argv is None else argv
    name = " ".join(["agentrl", *args[:1]])
    try:
        try:
            return _run(args)
        finally:
            if sys.stdout is not None:  # closed by whoever started us
                sys.stdout.flush()  # here, where a reader that is gone can be told from an error
    except KeyboardInterrupt:  # before a command has anything to save
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:  # a file that is missing, a folder, or not ours to read or write
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error
        print(f"{name}: {reason}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if args[0] == "--version":
        print(f"agentrl {agentrl.__version__}")
        return 0
    if args[0] not in COMMANDS:
        import difflib

        nearest = difflib.get_close_matches(args[0], COMMANDS, n=1)
        hint = f"; did you mean `{nearest[0]}`?" if nearest else f"; commands are {', '.join(COMMANDS)}"
        print(f"agentrl: no command {args[0]!r}{hint}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may hold what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    return import_module(f"agentrl.cli.{args[0]}").main(args[1:])

"""The command `baton`: finds the process that a word means and becomes it.

Every role is its own program with its own flags (`python -m router`, …); this one only knows their names, so that `baton` imports
nothing of theirs. Not here: flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from deploy.heedless import CannotSay, outlive_readers

# The words of a command -> what `python -m` runs.
COMMANDS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("up",): ("deploy.launcher",),
    ("router",): ("router",),
    ("prefill",): ("deploy.node_process", "prefill"),
    ("decode",): ("deploy.node_process", "decode"),
    ("mixed",): ("deploy.node_process", "mixed"),
    ("drain",): ("deploy.drain",),
    ("role",): ("deploy.role",),
    ("status",): ("deploy.status",),
    ("doctor",): ("deploy.doctor",),
    ("chat",): ("deploy.chat",),
    ("bench",): ("bench.serve",),
    ("certs", "make"): ("deploy.certs",),
    ("model", "make"): ("engine.make_model",),
    ("plan", "measure"): ("bench.plan_measure",),
    ("plan",): ("bench.planner",),
}

ROLES: Final = ("router", "prefill", "decode", "mixed")  # which services run: known by their command lines

HELP: Final = """\
usage: baton COMMAND [flags]      baton COMMAND --help lists the flags with their defaults; baton --version

  up           a whole cluster on this machine: baton up --model DIR --prefill 1 --decode 1 --port 8000
  router       the process that clients talk to, and the registry where nodes announce themselves
  prefill      a prefill node: computes the prompts' KV cache and hands it over
  decode       a decode node: generates
  mixed        a node that does both, over one pool: baton up --model DIR --prefill 0 --decode 0 --mixed 1
  drain        ask a node to hand over what it has, and to end: baton drain decode-0 --router 127.0.0.1:8001
  role         have a node serve in another role, without a restart: baton role decode-0 prefill --router 127.0.0.1:8001
  status       nodes, blocks and requests of a running cluster, live: baton status http://127.0.0.1:8000
  doctor       what is wrong with this machine, or with a cluster: baton doctor http://127.0.0.1:8000
  chat         talk to a model on any server of OpenAI's API: baton chat, or baton chat "What is Baton?"
  bench        load on any server of OpenAI's API, and what its clients see: baton bench http://127.0.0.1:8000 --rate 4
  certs make   certificates for --tls-dir, signed by an authority of your own: baton certs make certs --hosts node-a,node-b
  model make   a random model to try things on: baton model make --like llama-tiny --dtype fp32 --seed 0 --out DIR
               (or qwen2-tiny, qwen3-tiny, mistral-tiny, llama-125m, smollm2-135m, llama-3.2-1b, llama-3.1-8b)
  plan         how many nodes serve a trace within its objective, by simulation:
               baton plan --trace FILE --rates rates.json --slo-ttft-ms 2000 --slo-tpot-ms 50
  plan measure rates of a model on this machine, or of a running cluster: baton plan measure --model DIR --output rates.json

Every flag but those of model make is also a variable (--block-size: BATON_BLOCK_SIZE; --help names it) and a key of a TOML
file (block_size, with --config FILE); a flag wins over the variable, the variable over the file. A wrong value is one line
and exit code 2.

Several machines, or by hand:
  baton router  --model DIR --port 8000 --registry-port 8001
  baton prefill --model DIR --router 127.0.0.1:8001
  baton decode  --model DIR --router 127.0.0.1:8001
  baton mixed   --model DIR --router 127.0.0.1:8001
Several routers over the same nodes, all of them with --registry redis://HOST:6379/0 instead of --router.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; comes back only for `--help` and `--version`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help", "help"):
        return _say(HELP)
    if words in (["--version"], ["version"]):
        from importlib.metadata import version  # heavy: see below

        return _say(f"baton {version('baton')}\n")
    for name, target in COMMANDS.items():
        if tuple(words[: len(name)]) == name:
            starter = () if words[0] in ROLES else ("deploy.quiet_stop",)
            # -P: the current directory is the user's, a folder called `router` there is not ours
            os.execv(sys.executable, [sys.executable, "-P", "-m", *starter, *target, *words[len(name) :]])
    import difflib  # heavy, as asyncio is: all who name a command would wait for them, and see a traceback if they stopped that

    from runtime.process import fatal

    known = [" ".join(name) for name in COMMANDS]
    if not words:
        fatal(f"baton: a command is missing, one of {', '.join(known)}; see baton --help")
    close = difflib.get_close_matches(" ".join(words[:2]), known, n=1) or difflib.get_close_matches(
        words[0], known, n=1
    )
    hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(known)}"
    fatal(f"baton: {words[0]}: unknown command; {hint}")


def _say(text: str) -> int:
    """0, or 1 and a line where it cannot be written; nothing at all where nobody reads it."""
    outlive_readers()
    try:
        if sys.stdout is not None:  # as it is where it was closed from the first
            sys.stdout.write(text)
            sys.stdout.flush()
    except CannotSay as error:
        sys.stderr.write(f"baton: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

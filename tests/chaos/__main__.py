"""`python -m tests.chaos`: random faults on real processes under load, for as long as one likes. `make soak` calls it."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.namespaces import why_not
from tests.chaos.answers import CHAT_TEMPLATE
from tests.chaos.soak import Plan, Soak
from tests.registry.redis_server import PROGRAM as REDIS_PROGRAM


def main() -> int:
    """Run it; 0 if every answer was right, every fault fired, and nothing is held in the end."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Two routers, two prefill, two decode nodes, a mixed one and their Redis, real processes on a small model, are "
        "killed, stopped, replaced, told to go, given other roles, cut off from each other, while clients ask requests of every "
        "kind, for which some of the nodes have too few blocks. Every answer is "
        "compared with that of a cluster nothing happens to; in the end no node may hold a block. Without root nobody is cut off.",
    )
    parser.add_argument("--seconds", type=float, default=1800, help="how long faults happen (default %(default)s)")
    parser.add_argument(
        "--gap", type=float, default=3.0, help="seconds from fault to fault, on average (default %(default)s)"
    )
    parser.add_argument("--clients", type=int, default=8, help="requests under way (default %(default)s)")
    parser.add_argument("--seed", type=int, help="of faults and requests; none: drawn, and printed")
    parser.add_argument(
        "--registry",
        choices=("redis", "embedded"),
        default="redis" if REDIS_PROGRAM else "embedded",
        help="redis: one that all share and that is killed and cut off, too (default %(default)s)",
    )
    parser.add_argument("--logs", type=Path, help="folder that keeps the processes' logs (default: a temporary one)")
    given = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as temporary:
        folder = given.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = Path(temporary, "llama-tiny")
        make = ["engine.make_model", "--like", "llama-tiny", "--dtype", "fp32", "--seed", "0", "--out", str(model)]
        subprocess.run([sys.executable, "-m", *make], check=True)
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        sys.stdout.write(f"seed {seed}; registry: {given.registry}; partitions: {why_not() or 'yes'}\n")
        plan = Plan(seed, given.seconds, given.gap, given.clients, given.registry == "redis")
        return Soak(model, folder, plan).run()


if __name__ == "__main__":
    sys.exit(main())

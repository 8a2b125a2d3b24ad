"""`baton up`: routers and their nodes on this machine, each a process of its own, until a signal.

    routers --(ready files: registry addresses)--> nodes --(ready files)--> /ready --> cluster.json, a curl line
    forker: loads torch meanwhile ------------------^ are forked from it

Everything that was started ends with this process: on a signal each child is asked, then killed; if this process itself is
killed, the kernel kills the children (deploy/child_process.py). Restarts nothing, but for a node that the dashboard's button
killed (deploy/control.py). Not here: anything that serves.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import httpx
from rich.console import Console

from deploy.child_commands import environment_of, node_command, router_command
from deploy.child_process import ChildProcess, Starter, executed
from deploy.control import Control
from deploy.forker import Forker
from deploy.heedless import outlive_readers
from deploy.up_config import UpConfig
from runtime.authority import believing
from runtime.config import load, own_environment
from runtime.cores import usable_cores
from runtime.process import EXIT_USAGE, die_with_parent, fatal, first_signal, run_async, write_atomically
from runtime.variables import unread_variables

READY_POLL_S: Final = 0.05
SAY_EVERY_S: Final = 10.0  # what a start still waits for; one that goes well is over by then
OF_CHILDREN: Final = " (a setting of nodes or routers alone is given as {variable}, or in a --config file)"
_TRIAL: Final = bytes(1 << 16)
ROUTER_LEAD_S: Final = 1.5  # for the router to answer its clients; it grants them 1 s to take that


def main(argv: Sequence[str] | None = None) -> int:
    """Run `baton up` and return its exit code."""
    config = load(UpConfig, "baton up", "Start a router and its nodes on this machine.", argv, OF_CHILDREN)
    for fields in unread_variables(own_environment(), lacks_keys=config.api_keys is None):
        told = " ".join(f"{key}={value}" for key, value in fields.items())
        sys.stderr.write(f"baton up: warning: unknown_variable {told}\n")
    die_with_parent(config.parent_pid)
    outlive_readers(of_all=True)
    with _run_dir_of_our_own(config.run_dir):
        return run_async(_run(config))


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel and wait; its own exception, if it had one, is whoever's who asked for its result."""
    task.cancel()
    await asyncio.wait({task})


async def _run(config: UpConfig) -> int:
    return await _Launcher(config, Console(soft_wrap=True, highlight=False, markup=False)).run()


@dataclass(slots=True)
class _Node:
    """A node's process, and what it takes to start another."""

    command: Sequence[str]
    child: ChildProcess
    is_new: bool = False  # it was started in place of one that was killed, and does not serve yet


def _told_of(ready: Mapping[str, Any]) -> dict[str, Any]:
    """What cluster.json has of a node."""
    return {key: ready[key] for key in ("node_id", "role", "pid", "http", "grpc")}


class _CannotStart(Exception):
    """A process, or what tells of it, cannot be there; the message is one sentence."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class _Launcher:
    """One cluster from start to stop."""

    def __init__(self, config: UpConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._children: list[ChildProcess] = []
        self._nodes: dict[str, _Node] = {}
        self._threads = config.threads_by_role(usable_cores())
        environment = environment_of(config, min(self._threads.values(), default=1))
        self._forker = Forker(config.run_dir / "forker.log", environment, self._note_end_of_forker)
        self._cluster: dict[str, Any] = {}  # cluster.json, once it is written
        self._control = Control(self.replace) if config.has_kill_button else None
        self._control_address = ""
        self._replacements: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._num_running = 0
        self._lacking: list[str] = []  # before it is ready, as a router has said
        self._waits_for_ends: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[ChildProcess] = asyncio.Queue()
        self._first_end: asyncio.Future[ChildProcess] = asyncio.get_running_loop().create_future()
        self._started_at = time.monotonic()

    async def run(self) -> int:
        """Start, wait, stop; 0 after a signal, 1 or 2 if the cluster did not come up or nothing of it is left."""
        stopped = first_signal(or_hangup=True)
        start = asyncio.create_task(self._start())
        try:
            waits: set[asyncio.Future[Any]] = {start, stopped, self._first_end}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return 0
            if not start.done():  # whatever the start waits for will not come
                await _cancel(start)
                return self._report_failed_start(self._first_end.result())
            start.result()
            return await self._watch(stopped)
        except TimeoutError:
            waited_s, lacking = self._config.start_timeout_s, ", ".join(self._lacking)
            told = "; ".join(f"{each.name} said last: {each.last_sentence()}" for each in self._children[:1])
            sys.stderr.write(f"baton up: not ready after {waited_s:g} s{lacking and f': {lacking}'}; {told}\n")
            sys.stderr.write(f"baton up: see the logs in {self._config.run_dir}\n")
            return 1
        except _CannotStart as error:
            sys.stderr.write(f"baton up: {error}\n")
            return error.exit_code
        finally:
            self._stopping.set()
            await _cancel(start)
            if stopped.done():
                self._console.print("baton up: stopping")
            await self._stop()

    async def _start(self) -> None:
        """Everything up to the curl lines."""
        config = self._config
        names = ["router", *(f"router-{index}" for index in range(1, config.routers))]
        if self._control is not None:
            self._control_address = await self._control.open()
        with self._console.status("baton up: starting the router") as status:
            async with asyncio.timeout(config.start_timeout_s), self._saying_what_it_waits_for():
                with suppress(OSError):  # which comes again, for a node
                    await self._forker.open()
                environment = environment_of(config, threads=1) | {"BATON_LAUNCHER": self._control_address}
                children = [
                    await self._start_child(name, router_command(config, index), executed(environment))
                    for index, name in enumerate(names)
                ]
                routers = await asyncio.gather(*(self._ready(child) for child in children))
                status.update("baton up: the nodes load the model")
                nodes = await self._start_nodes(",".join(router["registry"] for router in routers))
                status.update("baton up: waiting for /ready")
                await asyncio.gather(*(self._wait_until_ready(router["url"]) for router in routers))
        told = [{key: router[key] for key in ("url", "registry", "pid")} for router in routers]
        self._cluster = {"router": told[0], "routers": told, "nodes": [_told_of(node) for node in nodes]}
        self._cluster["registry_namespace"] = config.registry_namespace
        self._write_cluster_json()
        self._say_how_to_use([router["url"] for router in routers], routers[0]["model"])

    @asynccontextmanager
    async def _saying_what_it_waits_for(self) -> AsyncIterator[None]:
        async def say() -> None:
            said: set[str] = set()
            while True:
                await asyncio.sleep(SAY_EVERY_S)
                for child in [each for each in self._children if not each.is_ready] or self._children[:1]:
                    if (told := f"{child.name} said last: {child.last_sentence()}") not in said:
                        self._console.print(f"baton up: still waiting; {told}")
                        said.add(told)

        saying = asyncio.create_task(say())
        try:
            yield
        finally:
            await _cancel(saying)

    async def _start_nodes(self, registry: str) -> list[dict[str, Any]]:
        """Start all nodes at once; what each of them wrote into its ready file. `registry`: of each router, where embedded."""
        config = self._config
        names = [(role, f"{role}-{index}") for role, number in config.nodes.items() for index in range(number)]
        children = []
        for role, name in names:
            command = [*node_command(config, role, name, registry), "--threads", str(self._threads[role])]
            child = await self._start_child(name, command, self._forker.fork)
            self._nodes[name] = _Node(command, child)
            children.append(child)
        return await asyncio.gather(*(self._ready(child) for child in children))

    def _note_end_of_forker(self, pid: int) -> None:
        if not self._stopping.is_set():
            what = f"the process that nodes are forked from (pid {pid}) has ended, and they with it"
            sys.stderr.write(f"baton up: {what}; see {self._config.run_dir / 'forker.log'}\n")

    async def replace(self, name: str) -> str | None:
        """Kill a node with SIGKILL and start a new one of its name; why not, if it was not."""
        node = self._nodes.get(name)
        if node is None:
            return f"There is no node {name[:100]!r} here."
        if self._stopping.is_set() or not self._cluster or node.is_new:
            return "The cluster is stopping." if self._stopping.is_set() else f"{name} is still starting."
        node.is_new = True
        killed = node.child
        killed.kill()
        await killed.ended()
        if self._stopping.is_set():
            return None
        try:
            node.child = await self._start_child(name, node.command, self._forker.fork, keeps_log=True)
        except _CannotStart as error:  # no process, no place for its log: asked for again, perhaps there is one
            node.is_new = False
            return f"{name} was killed, and no new one can be started: {error}"
        self._children.remove(killed)
        task = asyncio.create_task(self._welcome(node))
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)
        return None

    async def _welcome(self, node: _Node) -> None:
        """Have cluster.json name the new process once it serves."""
        ended = asyncio.create_task(node.child.ended())
        ready = asyncio.create_task(self._ready(node.child))
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                told = _told_of(ready.result())
                nodes = [told if each["node_id"] == told["node_id"] else each for each in self._cluster["nodes"]]
                self._cluster = self._cluster | {"nodes": nodes}
                self._write_cluster_json()
                if self._console.is_terminal:
                    self._console.print(f"baton up: {node.child.name} is up again")
        except _CannotStart as error:  # it serves all the same
            sys.stderr.write(f"baton up: {error}\n")
        finally:
            node.is_new = False
            await _cancel(ready)
            await _cancel(ended)

    def _write_cluster_json(self) -> None:
        try:
            write_atomically(self._config.run_dir / "cluster.json", self._cluster)
        except OSError as error:
            told = f"--run-dir {self._config.run_dir}: cluster.json cannot be written: {error.strerror}"
            raise _CannotStart(told, 1) from error

    async def _ready(self, child: ChildProcess) -> dict[str, Any]:
        content = await child.ready()
        if not self._console.is_terminal:
            self._console.print(f"baton up: {child.name} is up")
        return content

    async def _wait_until_ready(self, url: str) -> None:
        """Wait until the router can place a request as it is meant to be."""
        directory = self._config.tls_dir
        # It listens on all addresses perhaps, which no certificate is for; it is our own child.
        verify = believing(None if directory is None else directory / "ca.crt")
        verify.check_hostname = False
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=verify) as client:
            while True:
                with suppress(httpx.TransportError):  # if the router is gone, `run` hears of that by itself
                    ready = await client.get("/ready")
                    self._lacking = [*ready.json()["missing"], *ready.json()["degraded"]]
                    is_whole = not self._config.may_prefill or not ready.json()["degraded"]
                    if ready.status_code == httpx.codes.OK and is_whole:
                        return
                await asyncio.sleep(READY_POLL_S)

    def _report_failed_start(self, child: ChildProcess) -> int:
        """Show the child's own words: the user asked for one command and gets one answer."""
        if child.was_refused:
            sys.stderr.write(f"baton up: {child.last_sentence()}\n")
            return EXIT_USAGE
        sys.stderr.write(f"baton up: {child.how_it_ended()}; its last line: {child.last_sentence()}\n")
        return 1

    async def _stop(self) -> None:
        """End every child: the routers first, or their clients would hear of lost nodes instead of a shutdown."""
        if self._control is not None:
            await self._control.close()
        for task in list(self._replacements):
            await _cancel(task)
        timeout_s, num_routers = self._config.stop_timeout_s, self._config.routers
        stops = [asyncio.create_task(child.stop(timeout_s)) for child in self._children[:num_routers]]
        if stops:
            await asyncio.wait(stops, timeout=ROUTER_LEAD_S)
        await asyncio.gather(*stops, *(child.stop(timeout_s) for child in self._children[num_routers:]))
        await self._forker.close()

    async def _watch(self, stopped: asyncio.Future[signal.Signals]) -> int:
        """Report each child that ends, until a signal comes or none is left."""
        while self._num_running or not self._ended.empty():
            ended = asyncio.create_task(self._ended.get())
            waits: set[asyncio.Future[Any]] = {stopped, ended}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                ended.cancel()
                return 0
            sys.stderr.write(f"baton up: {ended.result().how_it_ended()}\n")
            if stopped.done():
                return 0
        sys.stderr.write("baton up: no process is left\n")
        return 1

    async def _start_child(
        self, name: str, command: Sequence[str], starter: Starter, *, keeps_log: bool = False
    ) -> ChildProcess:
        run_dir = self._config.run_dir
        try:
            child = await ChildProcess.start(name, command, run_dir, starter, keeps_log=keeps_log)
        except OSError as error:
            if error.filename is None or Path(error.filename).parent != run_dir:  # no process, no descriptor
                raise _CannotStart(f"{name} cannot be started: {error.strerror}", 1) from error
            told = f"--run-dir {run_dir}: {Path(error.filename).name} cannot be written: {error.strerror}"
            raise _CannotStart(told, EXIT_USAGE) from error
        self._children.append(child)
        self._num_running += 1
        task = asyncio.create_task(child.ended())
        task.add_done_callback(lambda _: self._note_end(child))
        self._waits_for_ends.add(task)
        task.add_done_callback(self._waits_for_ends.discard)
        return child

    def _note_end(self, child: ChildProcess) -> None:
        self._num_running -= 1
        self._ended.put_nowait(child)
        if not self._first_end.done():
            self._first_end.set_result(child)

    def _say_how_to_use(self, urls: list[str], model_id: str) -> None:
        config, say = self._config, self._console.print
        endpoint, body = config.example(model_id)
        took_s = time.monotonic() - self._started_at
        nodes = " + ".join(f"{number} {role}" for role, number in config.nodes.items())
        say(f"baton up: ready in {took_s:.1f} s, {nodes}, logs in {config.run_dir}")
        say(f"baton up: dashboard {urls[0]}/")
        for sentence in config.what_is_open():
            say(f"baton up: warning: {sentence}")
        flags = "" if config.tls_dir is None else f" --cacert {shlex.quote(str(config.tls_dir / 'ca.crt'))}"
        flags += "" if config.api_keys is None else ' -H "Authorization: Bearer $KEY"'
        for each in (body, body | {"stream": True}):
            said = shlex.quote(json.dumps(each))
            say(f"  curl -N{flags} {urls[0]}{endpoint} -H 'Content-Type: application/json' -d {said}")
        if len(urls) > 1:
            say(f"baton up: the other routers: {' '.join(urls[1:])}")
        say("baton up: Ctrl-C stops everything")


@contextmanager
def _run_dir_of_our_own(run_dir: Path) -> Iterator[None]:
    """Hold the run directory (a lock that ends with this process, and leaves no file).

    cluster.json is there from when the cluster can serve to its end: the ports that it names may be another's then. What a killed
    launcher has left is cleared here.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        why = (
            "is no directory"
            if isinstance(error, (FileExistsError, NotADirectoryError))
            else f"cannot be made: {error.strerror}"
        )
        fatal(f"baton up: --run-dir {run_dir}: {why}")
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with TemporaryFile(dir=run_dir, buffering=0) as trial:  # before anything is started
            trial.write(_TRIAL)  # a full disk takes files, and nothing in them: no log would say what is wrong
        (run_dir / "cluster.json").unlink(missing_ok=True)
    except BlockingIOError:
        fatal(f"baton up: --run-dir {run_dir}: another baton up runs there; choose another directory")
    except OSError as error:
        fatal(f"baton up: --run-dir {run_dir}: cannot be written: {error.strerror}")
    try:
        yield
    finally:
        with suppress(OSError):  # there is none, or the directory itself has gone
            (run_dir / "cluster.json").unlink()
        os.close(directory)


if __name__ == "__main__":
    sys.exit(main())

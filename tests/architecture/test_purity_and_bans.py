"""What is nowhere in the project, and what is not in the files that decide."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Final

import pytest

from tests.architecture.source_tree import Source, sources, sources_of_rooms

PURE_FILES: Final = {
    "core.py",
    "placement.py",
    "admission.py",
    "api_keys.py",
    "binding.py",
    "block_pool.py",
    "scheduler.py",
    "prefix_cache.py",
    "sequence.py",
    "plan.py",
    "pool_book.py",
    "prefill_speed.py",
    "rates.py",
    "handoff.py",
    "held.py",
    "kv_breaker.py",
    "kv_pool_address.py",
    "kv_record.py",
    "kv_staging.py",
    "kv_store.py",
    "lease.py",
    "leases.py",
    "token_log.py",
    "session.py",
    "block_key.py",
    "cache_feed.py",
    "cache_index.py",
    "cache_map.py",
    "choice_text.py",
    "dashboard_state.py",
    "entrance.py",
    "fence.py",
    "foreign_pages.py",
    "goodput.py",
    "grammar_book.py",
    "grammar_lines.py",
    "key_log.py",
    "kill_rules.py",
    "key_table.py",
    "keyed_heap.py",
    "links.py",
    "listing.py",
    "messages.py",
    "newcomers.py",
    "node_state.py",
    "nodes.py",
    "ownership.py",
    "polled_listing.py",
    "rate_limit.py",
    "regex_rules.py",
    "registry_record.py",
    "requests.py",
    "seeds.py",
    "sampling.py",
    "session_book.py",
    "session_end.py",
    "session_events.py",
    "split.py",
    "steps.py",
    "stop_strings.py",
    "sweep.py",
    "structured.py",
    "task.py",
    "tasks.py",
    "timeline.py",
    "timeline_json.py",
    "timeline_picture.py",
    "timelines.py",
    "timers.py",
    "timing.py",
    "token_batches.py",
    "unheard.py",
    "validate.py",
    "waiting.py",
    "watch.py",
}
IMPURE_MODULES: Final = {
    "asyncio",
    "socket",
    "threading",
    "time",
    "os",
    "zmq",
    "grpc",
    "redis",
    "random",
    "logging",
    "torch",
    "multiprocessing",
    "select",
    "subprocess",
}
PICKLERS: Final = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "multiprocessing",
    "joblib",
}
UNSAFE_CALLS: Final = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "yaml.load",
    "numpy.load",
    "np.load",
    "os.system",
}
WALL_CLOCK: Final = {
    "time.time",
    "time.time_ns",
    "time.clock_gettime",
    "datetime.now",
    "datetime.utcnow",
    "datetime.datetime.now",
    "date.today",
}
WALL_CLOCK_FILES: Final = {
    "router/openai_answers.py": "the API's field `created`, by which nothing is decided",
    "router/chat_template.py": "today's date, for templates that write it",
    "runtime/process.py": "what another process has computed, by that process's own clock",
    "node/process.py": "which of two processes of one name is the newer; a wrong clock costs one restart more",
    "deploy/doctor.py": "how far hosts' clocks are apart, for people: nothing depends on it",
    "bench/machine.py": "the date in a result file, for its reader",
    "runtime/certificates.py": "certificates say by the clock when they end",
    "runtime/certificate_watch.py": "the same: how far off that is, for people",
    "deploy/own_machine.py": "the same, for who asks baton doctor",
    "runtime/tracing.py": "spans say by the clock when they began, for a collector: nothing depends on it",
}
ENVIRONMENT: Final = {"environ", "environb", "getenv", "putenv", "unsetenv"}
ENVIRONMENT_FILE: Final = "runtime/config.py"
# Only an entry and one HTTP request's boundary may catch everything, and who calls what raises nothing narrower.
BROAD_EXCEPT_NAMES: Final = {"__main__.py", "http.py"}
BROAD_EXCEPTS: Final = {
    "router/text.py": "tokenizers raises Exception itself",
    "router/answer.py": "a bug in writing one answer is raised in that answer's handler",
}
CREDENTIALS_FILE: Final = "runtime/credentials.py"  # the one place that decides what is shown and what is asked for
CHANNELS: Final = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
BANNED_NAMES: Final = {"utils", "util", "common", "helpers", "helper", "misc"}

Finder = Callable[[Source], Iterable[str]]


def _pickles(source: Source) -> Iterable[str]:
    for line, imported in source.imports():
        if imported.split(".")[0] in PICKLERS:
            yield f"{line} imports {imported}"


def _unsafe_calls(source: Source) -> Iterable[str]:
    for line, called, _ in source.calls():
        if called in UNSAFE_CALLS:
            yield f"{line} calls {called}"


def _transformers(source: Source) -> Iterable[str]:
    for line, imported in source.imports():
        if imported.split(".")[0] == "transformers":
            yield f"{line} imports transformers, which is a test oracle only"


def _prints(source: Source) -> Iterable[str]:
    yield from (f"{line} calls print" for line, called, _ in source.calls() if called == "print")


def _wall_clock(source: Source) -> Iterable[str]:
    if source.path in WALL_CLOCK_FILES:
        return
    yield from (f"{line} reads {called}" for line, called, _ in source.calls() if called in WALL_CLOCK)
    yield from (f"{line} imports {name}" for line, name in source.imports() if name in WALL_CLOCK)


def _environment(source: Source) -> Iterable[str]:
    if source.path == ENVIRONMENT_FILE:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) == "os":
            yield f"{node.lineno} reads os.{node.attr}"
    yield from (f"{line} imports {name}" for line, name in source.imports() if name.removeprefix("os.") in ENVIRONMENT)


def _broad_excepts(source: Source) -> Iterable[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {ast.unparse(each) if each else "everything" for each in caught}
            is_allowed = source.name in BROAD_EXCEPT_NAMES or source.path in BROAD_EXCEPTS
            if names & {"everything", "Exception", "BaseException"} and not is_allowed:
                yield f"{node.lineno} catches {', '.join(sorted(names))}"


def _swallowed(source: Source) -> Iterable[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(each, ast.Pass) for each in node.body):
            yield f"{node.lineno} catches and does nothing"


def _module_state(source: Source) -> Iterable[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno} has a global statement"
    for statement in source.tree.body:
        is_final = isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation).startswith("Final")
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) and not is_final else None
        if isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp):
            yield f"{statement.lineno} holds something mutable"


def _effects_of_import(source: Source) -> Iterable[str]:
    for statement in source.tree.body:
        if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
            yield f"{statement.lineno} does something at import"


def _mutable_defaults(source: Source) -> Iterable[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if isinstance(default, ast.List | ast.Dict | ast.Set):
                    yield f"{node.lineno} has a mutable default"


def _channels(source: Source) -> Iterable[str]:
    if source.path == CREDENTIALS_FILE:
        return
    yield from (f"{line} calls {called}" for line, called, _ in source.calls() if called.split(".")[-1] in CHANNELS)


def _banned_names(source: Source) -> Iterable[str]:
    for part in source.path.removesuffix(".py").split("/"):
        if part in BANNED_NAMES:
            yield f"1 is called {part}, which says nothing"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Mixin", "Impl", "Helper", "Utils", "Singleton")):
            yield f"{node.lineno} defines {node.name}"


BANS: Final[dict[str, Finder]] = {
    "transformers": _transformers,
    "print": _prints,
    "wall clock": _wall_clock,
    "environment outside runtime/config.py": _environment,
    "channels that credentials know nothing of": _channels,
    "broad except": _broad_excepts,
    "swallowed exception": _swallowed,
    "mutable module state": _module_state,
    "import with an effect": _effects_of_import,
    "mutable default": _mutable_defaults,
    "names that say nothing": _banned_names,
}


def _found(find: Finder, where: Iterable[Source]) -> list[str]:
    return [f"{source.path}:{breach}" for source in where for breach in find(source)]


@pytest.mark.covers("X01")
def test_nothing_pickles_evaluates_or_loads_unsafely_anywhere() -> None:
    """Tests included: nobody copies from a test what the project bans."""
    assert not _found(_pickles, sources())
    assert not _found(_unsafe_calls, sources())


@pytest.mark.parametrize("ban", BANS)
def test_the_rooms_are_free_of(ban: str) -> None:
    """One ban, all rooms."""
    found = _found(BANS[ban], sources_of_rooms())
    assert not found, "\n".join(found)


def test_the_files_that_decide_import_nothing_that_acts() -> None:
    """No socket, clock, thread, log or tensor inside: same inputs, same outputs."""
    pure = [source for source in sources_of_rooms() if source.name in PURE_FILES]
    assert len(pure) > 1
    breaches = [
        f"{source.path}:{line} imports {imported}"
        for source in pure
        for line, imported in source.imports()
        if imported.split(".")[0] in IMPURE_MODULES
    ]
    assert not breaches, "\n".join(breaches)


BROKEN: Final = """
import pickle, transformers
from time import time
CACHE = []
register()
def f(x=[]):
    global CACHE
    try:
        print(eval(x), os.environ["A"], time.time(), grpc.aio.insecure_channel(x))
    except Exception:
        pass
class ThingMixin: ...
"""


@pytest.mark.covers("X01")
@pytest.mark.parametrize("find", [*BANS.values(), _pickles, _unsafe_calls])
def test_each_ban_finds_its_breach(find: Finder) -> None:
    """A ban that can find nothing proves nothing."""
    assert list(find(Source("router/utils.py", BROKEN)))

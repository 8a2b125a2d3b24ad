"""`baton chat`: talk to a model on a terminal, or ask it one thing from a script.

Not here: what lines and events mean (chat_talk.py), HTTP (chat_server.py).
"""

from __future__ import annotations

import io
import json
import os
import re
import readline
import sys
import termios
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from deploy.chat_server import ChatProblem, ChatServer, Refused
from deploy.chat_talk import CUT_SHORT, HELP, Answer, Command, Say, Talk, Typing, Unknown, meaning_of, shown, wait_s
from runtime.command_words import as_flags
from runtime.config import knob, load
from runtime.process import fatal
from runtime.server_url import read_url
from runtime.unanswered import check_key

PROG: Final = "baton chat"
INTERRUPTED: Final = 130
_HISTORY_LINES: Final = 1000

DESCRIPTION: Final = """\
Talk to a model, streaming, on any server of OpenAI's API. With a question, or with one on stdin, print just the answer.

  baton chat                                        the first model at http://127.0.0.1:8000
  baton chat http://10.0.0.5:8000 --model llama-3 --system "Answer in one sentence."
  baton chat "What is Baton?" > answer.txt        one answer; exit code 1 and a line on stderr where there is none
  git diff | baton chat --system "Say what this changes."

In a chat: /help /reset /system /save /stats /quit. Ctrl-C stops an answer, not the chat."""


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """One chat."""

    url: str = knob("http://127.0.0.1:8000", "the server, with or without /v1; also without the flag", metavar="URL")
    question: str | None = knob(None, "ask this, print the answer, end; also without the flag", metavar="TEXT")
    model: str | None = knob(
        None, "name to ask for; none: the first one of /v1/models", metavar="NAME", variable="BATON_CHAT_MODEL"
    )
    system: str | None = knob(None, "system prompt", metavar="TEXT")
    api_key: str | None = knob(
        None, "key to show, where the server asks; better in the variable, where ps does not show it", metavar="KEY"
    )
    ca: Path | None = knob(
        None,
        "certificate authority that signed the server's certificate, as PEM; none: those that this host trusts",
        metavar="FILE",
    )
    max_tokens: int | None = knob(None, "longest answer, in tokens; none: what the server allows", low=1)
    temperature: float | None = knob(None, "of the sampling; none: the model's own", low=0, high=2)
    seed: int | None = knob(None, "of the sampling", low=0, high=(1 << 63) - 1)
    patience_s: float = knob(
        60.0, "seconds to wait, in all, for a server that is busy and says when to come back", low=0, high=86_400
    )
    timeout_s: float = knob(600.0, "seconds of silence until an answer counts as lost", low=0.001, high=86_400)
    history: Path | None = knob(None, "file that keeps typed lines from one chat to the next", metavar="FILE")

    def __post_init__(self) -> None:
        try:
            read_url(self.url)
        except ValueError as error:
            raise ValueError(f"--url {error}") from None
        if self.question is not None and not self.question.strip():
            raise ValueError("--question: is empty")
        check_key(self.api_key)
        if self.ca is not None and not self.ca.is_file():
            raise ValueError(f"--ca {self.ca}: is no file")
        if self.history is not None and not self.history.absolute().parent.is_dir():
            raise ValueError(f"--history {self.history}: its folder does not exist")

    @property
    def fields(self) -> dict[str, Any]:
        """What each request says beside its messages."""
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Chat, or answer; 0, 1 where there is no answer, 2 for what the user can mend, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = load(ChatConfig, PROG, DESCRIPTION, with_names(words))
    for name in ("stdin", "stdout"):
        if getattr(sys, name) is None:
            fatal(f"{PROG}: {name} is closed; what is not needed can be </dev/null or >/dev/null")
    for stream in (sys.stdin, sys.stdout):  # a diff of old files is no UTF-8, an old terminal knows few characters
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        with ChatServer(config.url, config.api_key, config.ca, config.timeout_s) as server:
            if config.question is None and is_terminal:
                return _Chat(config, server).run()
            return _answer_once(config, server)
    except ChatProblem as problem:
        sys.stderr.write(f"{PROG}: {problem}\n")
        return 1
    except BrokenPipeError:  # whoever reads the answer has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED


def with_names(words: Sequence[str]) -> list[str]:
    """A command's words as flags: among them there may be a URL, and a question."""
    return as_flags(words, ("--url", "--question"), fits=lambda flag, word: flag != "--url" or _is_url(word))


def _is_url(word: str) -> bool:
    """HOST:PORT is none, and told so rather than asked as a question."""
    return re.fullmatch(r"https?://\S*|[\w.-]+:[0-9]+", word) is not None


def _answer_once(config: ChatConfig, server: ChatServer) -> int:
    if config.question is None and sys.stdin.isatty():
        fatal(f"{PROG}: a chat needs a terminal to write to; give a question to have its answer in a file")
    question = sys.stdin.read() if config.question is None else config.question
    if not question.strip():
        fatal(f"{PROG}: stdin holds no question")
    talk = Talk(config.model or server.first_model(), config.system)
    answer = Answer(time.monotonic())
    for piece in _asked(config, server, talk, question, answer):
        sys.stdout.write(shown(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    sys.stdout.write("" if answer.text.endswith("\n") else "\n")
    if answer.is_cut_short:
        raise ChatProblem(CUT_SHORT)
    return 0


def _asked(
    config: ChatConfig, server: ChatServer, talk: Talk, question: str, answer: Answer
) -> Generator[str, None, None]:
    """The pieces of an answer as they come; waits where the server says when to come back. Raises ChatProblem."""
    waited_s = 0.0
    while True:
        answer.begun_at = time.monotonic()
        try:
            with closing(server.events(talk.model, talk.messages(question), config.fields)) as events:
                for event in events:
                    try:
                        yield answer.take(event, time.monotonic())
                    except (KeyError, TypeError, ValueError, AttributeError):
                        raise ChatProblem(f"{server.url}: sends what is no event of a chat: {event!r:.80}") from None
            return
        except Refused as refused:
            seconds = wait_s(refused.status, refused.retry_after, waited_s, config.patience_s)
            if seconds is None:
                raise
            sys.stderr.write(f"{PROG}: {refused}; again in {seconds:g} s\n")
            time.sleep(seconds)
            waited_s += seconds


class _Chat:
    """A chat on a terminal."""

    def __init__(self, config: ChatConfig, server: ChatServer) -> None:
        self._config = config
        self._server = server
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._talk = Talk(config.model or server.first_model(), config.system)

    def run(self) -> int:
        """Until the user ends it."""
        self._dim(f"{self._talk.model} at {self._server.url}; /help lists the commands, Ctrl-D ends")
        typing = Typing()
        with _line_history(self._config.history), _keys_kept():
            while True:
                try:
                    text = typing.take(input("... " if typing.is_open else "> "))
                    if text is not None and not self._handle(text):
                        return 0
                except KeyboardInterrupt:
                    typing.drop()
                    self._dim("\nCtrl-D or /quit ends the chat")
                except EOFError:
                    self._console.print()
                    return 0

    def _handle(self, text: str) -> bool:
        """False: the chat is over."""
        match meaning_of(text):
            case None:
                pass
            case Unknown(message):
                self._dim(message)
            case Say(question):
                self._say(question)
            case Command("/quit", _):
                return False
            case Command("/help", _):
                self._dim(HELP)
            case Command("/stats", _):
                self._dim(self._talk.in_words())
            case Command("/reset", _):
                self._talk.reset()
                self._dim("forgotten")
            case Command("/system", argument):
                self._set_system(argument)
            case Command("/save", argument):
                self._save(argument)
            case Command(name, _):
                raise AssertionError(name)
        return True

    def _say(self, question: str) -> None:
        answer = Answer(time.monotonic())
        try:
            with closing(_asked(self._config, self._server, self._talk, question, answer)) as pieces:
                num_shown = 0  # characters of the thought
                for piece in pieces:
                    if thought := answer.thought[num_shown:]:
                        self._console.print(Text(shown(thought), "dim"), end="")
                        num_shown += len(thought)
                    is_first = num_shown and piece and piece == answer.text
                    sys.stdout.write("\n\n" * bool(is_first) + shown(piece))
                    sys.stdout.flush()
            how = answer.in_words()
        except KeyboardInterrupt:
            how = "stopped" + (f" · {told}" if (told := answer.in_words()) else "")
        except ChatProblem as problem:
            how = str(problem)
        self._talk.answered(question, answer)
        if (told := answer.text or answer.thought) and not told.endswith("\n"):
            sys.stdout.write("\n")
        self._dim(how)

    def _set_system(self, text: str) -> None:
        if text:
            self._talk.system = text
            self._talk.reset()
        self._dim(f"system prompt: {self._talk.system or 'none'}")

    def _save(self, name: str) -> None:
        if not name:
            self._dim("/save needs a file's name")
            return
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self._talk.to_json(), indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            self._dim(f"{path}: {error.strerror}")
        else:
            self._dim(f"written: {path}")

    def _dim(self, text: str) -> None:
        self._console.print(Text(shown(text), "dim"))


@contextmanager
def _line_history(path: Path | None) -> Iterator[None]:
    """Lines can be edited and called back; those of earlier chats, too, where a file keeps them."""
    if path is None:
        yield
        return
    try:
        path.touch(0o600)
        readline.read_history_file(path)
    except OSError as error:
        fatal(f"{PROG}: --history {path}: cannot be kept: {error.strerror}")
    try:
        yield
    finally:
        readline.set_history_length(_HISTORY_LINES)
        try:
            readline.write_history_file(path)
        except OSError as error:  # the disk is full meanwhile, say
            sys.stderr.write(f"{PROG}: --history {path}: was not kept: {error.strerror}\n")


@contextmanager
def _keys_kept() -> Iterator[None]:
    """What is typed while an answer comes is there for the next line, a Ctrl-D too, which terminals that gather lines swallow."""
    before, kept = (termios.tcgetattr(sys.stdin) for _ in range(2))
    kept[3] &= ~termios.ICANON
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())

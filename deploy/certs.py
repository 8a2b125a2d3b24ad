"""`baton certs make DIR`: a private certificate authority, and what each host of a cluster needs for `--tls-dir`.

    DIR/ca.key, DIR/ca.crt        the authority; ca.key signs new hosts and is needed nowhere else: keep it off them
    DIR/HOST/                     what goes to HOST, as its --tls-dir: ca.crt, tls.crt, tls.key

Called again with other hosts it signs those with the authority that is there. Nothing is overwritten, and a call that fails or is
killed leaves nothing half made: all is written beside its place, and moved.
Not here: what a certificate is (runtime/certificates.py), what a process does with it (runtime/credentials.py).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from runtime.command_words import as_flags
from runtime.config import knob, load
from runtime.process import fatal

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")  # in each certificate: a host may always talk to itself
_AUTHORITY: Final = ("ca.crt", "ca.key")  # files of it, which lie beside the hosts' directories
_AUTHORITY_LASTS: Final = 10  # times as long as what it signs
_NAME: Final = re.compile(
    r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*"
)
_DIGITS: Final = re.compile(r"[0-9.]+")  # an address that is none, such as 10.0.0.500
DESCRIPTION: Final = """\
Make a private certificate authority and, for each host, the directory that its processes are given as --tls-dir.

  baton certs make certs                                     for this machine alone: certs/localhost
  baton certs make certs --hosts node-a/10.0.0.5,node-b      certs/node-a, known by that name and that address; certs/node-b
  baton certs make certs --hosts node-c                      one more host, signed by the authority that is there

Copy each directory to its host, and nothing else: with ca.key anybody is a member of the cluster. To renew a host's certificate,
delete its directory, call this again, and copy the files over the host's: processes take up those that have changed."""


@dataclass(frozen=True, slots=True)
class CertsConfig:
    """What is to be made."""

    out: Path = knob(help="directory to make or to add to; also without the flag", metavar="DIR")
    hosts: tuple[str, ...] = knob(
        ("localhost",),
        "hosts, each as its name or address and, behind slashes, others by which it is dialled: NAME/ADDRESS/…",
        metavar="A,B,…",
    )
    days: int = knob(
        365, "days until hosts' certificates end; the authority's lasts ten times as long", low=1, high=3650
    )

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("--hosts: at least one is needed")
        first = [names_of_host(host)[0] for host in self.hosts]
        for name in first:
            if first.count(name) > 1:
                raise ValueError(f"--hosts {name}: is there twice")


def names_of_host(host: str) -> tuple[str, ...]:
    """The names of one entry of --hosts, loopback's behind them. Raises ValueError, one sentence."""
    names = [name.strip() for name in host.split("/")]
    for name in names:
        if not _is_address(name) and (len(name) > 253 or not _NAME.fullmatch(name) or _DIGITS.fullmatch(name)):
            raise ValueError(f"--hosts {host}: {name or 'nothing'} is no host name and no address")
    if names[0].startswith("*"):
        raise ValueError(f"--hosts {host}: the first name is its directory's, and cannot begin with *")
    if names[0] in _AUTHORITY:
        raise ValueError(f"--hosts {host}: the first name is its directory's, and {names[0]} is the authority's file")
    return tuple(dict.fromkeys([*names, *LOOPBACK]))


def main(argv: Sequence[str] | None = None) -> int:
    """Make them; 0, or one line and 2 for what the user can mend."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = load(CertsConfig, "baton certs make", DESCRIPTION, as_flags(words, ("--out",)))
    try:
        for line in _make(config):
            sys.stdout.write(f"baton certs make: {line}\n")
    except OSError as error:
        fatal(f"baton certs make: {error.filename}: {error.strerror}")
    except ValueError as error:
        fatal(f"baton certs make: {error}")
    return 0


def _make(config: CertsConfig) -> list[str]:
    """What was made, for the user."""
    from runtime.certificates import Pair, ends_at, make_authority, sign_host  # heavy: --help answers without it

    hosts = {names[0]: names for names in map(names_of_host, config.hosts)}
    for host in hosts:
        if (config.out / host).exists():
            raise ValueError(f"{config.out / host}: is there already; delete it first to make it anew")
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"{config.out}: is no directory")
    config.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    certificate_path, key_path = (config.out / name for name in _AUTHORITY)
    contents: dict[str, bytes] = {}
    if key_path.exists() != certificate_path.exists():
        raise ValueError(f"{config.out}: has one of ca.crt and ca.key without the other")
    if key_path.exists():
        authority = Pair(certificate_path.read_bytes(), key_path.read_bytes())
        made = "as it was"
    else:
        authority = make_authority(config.days * _AUTHORITY_LASTS)
        contents |= {"ca.key": authority.key, "ca.crt": authority.certificate}
        made = "new"
    ends = ends_at(authority.certificate, "ca.crt")
    lines = [f"{certificate_path} is the authority, {made}, until {ends:%Y-%m-%d}; keep {key_path} off the hosts"]
    for host, names in hosts.items():
        pair = sign_host(authority, names, config.days)
        contents |= {f"{host}/ca.crt": authority.certificate, f"{host}/tls.crt": pair.certificate}
        contents |= {f"{host}/tls.key": pair.key}
        ends = min(ends_at(pair.certificate), ends_at(authority.certificate, "ca.crt"))
        lines.append(f"--tls-dir {config.out / host} for {', '.join(names)}, until {ends:%Y-%m-%d}")
    _write(config.out, contents)
    return lines


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    """New files there and in new directories, that their owner alone can read: all of them, or none. Raises OSError."""
    try:
        with TemporaryDirectory(prefix=".", dir=out) as unfinished:
            for name, content in contents.items():
                path = Path(unfinished, name)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                path.touch(mode=0o600)
                path.write_bytes(content)
            for name in dict.fromkeys(name.partition("/")[0] for name in contents):
                if (out / name).exists():  # somebody else makes some, too
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                Path(unfinished, name).rename(out / name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

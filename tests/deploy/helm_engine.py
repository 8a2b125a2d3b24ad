"""Helm itself, as a program: `python -m tests.deploy.helm_engine LIBRARY < cases.json` installs each, and says what came of it.

LIBRARY is the one of the package helm-sdkpy, which has Helm's own code (v4.3) and a few functions of C over it; `make test-setup`
puts it into .venv/helm. With `upgrade` the objects are those after it, somebody having scaled the routers before. A process of its
own, since Go's runtime lives in it. Not here: what an install must look like (test_helm_*.py).

    [{"values": {…}, "release": "baton", "namespace": "inference", "upgrade": {"routers": 5, "values": {…}}}]
    {"lint": […], "installs": [{"error": "", "manifests": […], "notes": "…"}]}
"""

from __future__ import annotations

import base64
import ctypes
import gzip
import json
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.api_server import RELEASE, api_server

CHART: Final = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "baton"


class HelmError(RuntimeError):
    """Helm refused; the message is its own."""


class Helm:
    """Helm's actions against one API server and namespace."""

    def __init__(self, library: Path, url: str, namespace: str) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.helm_sdkpy_last_error.restype = ctypes.c_char_p
        self._handle = ctypes.c_ulonglong()
        where = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": {"server": url}}],
            "users": [{"name": "it", "user": {}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": namespace}}],
            "current-context": "it",
        }
        config = yaml.safe_dump(where).encode()
        self._checked(
            self._library.helm_sdkpy_config_create(namespace.encode(), config, None, b"{}", ctypes.byref(self._handle))
        )

    def close(self) -> None:
        """Let go of it."""
        self._library.helm_sdkpy_config_destroy(self._handle)

    def lint(self, chart: Path) -> list[dict[str, Any]]:
        """What is wrong with the chart, or could be better: Severity 1 (a hint) to 3, and the file."""
        out = ctypes.c_char_p()
        self._checked(self._library.helm_sdkpy_lint(self._handle, str(chart).encode(), ctypes.byref(out)))
        found: dict[str, Any] = json.loads(out.value or b"{}")
        messages: list[dict[str, Any]] = found["Messages"]
        return messages

    def install(self, release: str, chart: Path, values: dict[str, Any]) -> None:
        """Install without waiting for anything to run. Raises HelmError."""
        self._do(self._library.helm_sdkpy_install, release, chart, values)

    def upgrade(self, release: str, chart: Path, values: dict[str, Any]) -> None:
        """Likewise, what is installed."""
        self._do(self._library.helm_sdkpy_upgrade, release, chart, values)

    def _do(self, action: Any, release: str, chart: Path, values: dict[str, Any]) -> None:
        out = ctypes.c_char_p()
        options = {
            "wait": False,
            "timeout_seconds": 30,
            "server_side_apply": "false",
            "disable_openapi_validation": True,
        }
        self._checked(
            action(
                self._handle,
                release.encode(),
                str(chart).encode(),
                json.dumps(values).encode(),
                b"",
                json.dumps(options).encode(),
                ctypes.byref(out),
            )
        )

    def _checked(self, code: int) -> None:
        if code != 0:
            raise HelmError((self._library.helm_sdkpy_last_error() or b"no word").decode())


def notes_in(memory: bytes) -> str:
    """What Helm told whoever installed, out of the Secret in which it remembers that."""
    packed = RELEASE.search(memory)
    if packed is None:
        raise HelmError("no release in the Secret")
    release: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[0])))
    return str(release["info"]["notes"])


def install(library: Path, case: dict[str, Any]) -> dict[str, Any]:
    """One case, at a server of its own: the manifests that Helm gave the server, its notes; or why it would not."""
    with api_server() as server:
        helm = Helm(library, server.url, case["namespace"])
        try:
            helm.install(case["release"], CHART, case["values"])
            if later := case["upgrade"]:
                (routers,) = (each for each in server.live.values() if each["kind"] == "Deployment")
                routers["spec"]["replicas"] = later["routers"]
                helm.upgrade(case["release"], CHART, later["values"])
                return {"error": "", "manifests": [*server.live.values()], "notes": notes_in(server.memories[-1])}
        except HelmError as error:
            return {"error": str(error), "manifests": [], "notes": ""}
        finally:
            helm.close()
    return {"error": "", "manifests": server.given, "notes": notes_in(server.memories[-1])}


def main() -> None:
    """Read the cases, say what came of them."""
    library = Path(sys.argv[1])
    with api_server() as server:
        helm = Helm(library, server.url, "default")
        messages = helm.lint(CHART)
        helm.close()
    json.dump({"lint": messages, "installs": [install(library, case) for case in json.load(sys.stdin)]}, sys.stdout)


if __name__ == "__main__":
    main()

"""Bugs of what keeps strangers out: keys, limits, certificates, encrypted links, bounds of HTTP."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_KEYS: Final = ("tests/router/test_api_keys.py",)
_LIMITS: Final = ("tests/router/test_rate_limit.py",)
_GATE: Final = ("tests/router/test_gate.py",)
_CURVE: Final = ("tests/transport/test_curve.py",)
_CREDENTIALS: Final = ("tests/security/test_credentials.py",)
_RENEWED: Final = ("tests/security/test_renewed_credentials.py",)
_UNHEARD: Final = ("tests/security/test_unheard.py",)
_HTTP: Final = ("tests/security/test_http_bounds.py",)

MUTANTS: Final = (
    Mutant(
        "any-scheme-is-a-key",
        "A key is taken from any kind of authorization, Basic's user and password too.",
        "router/api_keys.py",
        'if scheme.lower() != b"bearer":',
        "if not scheme:",
        _KEYS,
    ),
    Mutant(
        "one-name-two-limits",
        "Two lines of one name may say different limits: which counts depends on the key.",
        "router/api_keys.py",
        "if by_name.setdefault(client.name, client) != client:",
        "if by_name.setdefault(client.name, client) is None:",
        _KEYS,
    ),
    Mutant(
        "wait-told-too-short",
        "Who is over its limit is told half of the wait.",
        "router/rate_limit.py",
        "return Over(what, limit, missing * MINUTE_S / limit)",
        "return Over(what, limit, missing * MINUTE_S / limit / 2)",
        _LIMITS,
    ),
    Mutant(
        "limit-one-over",
        "One more passes than the limit says.",
        "router/rate_limit.py",
        "if missing > _ROUNDING:",
        "if missing > 1:",
        _LIMITS,
    ),
    Mutant(
        "bucket-without-a-rim",
        "Who has been quiet for a day may ask for a day's worth at once.",
        "router/rate_limit.py",
        "min(self.level + gained, float(limit))",
        "self.level + gained",
        _LIMITS,
    ),
    Mutant(
        "completions-are-free",
        "What was generated is not taken from the bucket.",
        "router/rate_limit.py",
        ".level -= num_tokens",
        ".level -= 0",
        _LIMITS,
    ),
    Mutant(
        "workers-do-not-listen",
        "What another worker let a client have is not taken here: a limit holds for each worker by itself.",
        "router/rate_limit.py",
        ".level -= taken.amount",
        ".level -= 0",
        _LIMITS,
    ),
    Mutant(
        "first-of-several-headers",
        "Of several Authorization headers the first counts: a proxy in front may have looked at another one.",
        "router/gate.py",
        "self._keys().find(shown[0]) if len(shown) == 1 else None",
        "self._keys().find(shown[0]) if shown else None",
        _GATE,
    ),
    Mutant(
        "deep-looks-are-open",
        "A look that costs work needs no key.",
        "router/gate.py",
        'return path in self._open_paths and not (path == "/ready" and scope.get("query_string"))',
        "return path in self._open_paths",
        _GATE,
    ),
    Mutant(
        "any-curve-key-opens-a-link",
        "Whoever speaks CURVE gets in, whatever his key.",
        "connector/zmq_gate.py",
        'is_known = mechanism == b"CURVE" and hmac.compare_digest(shown[0], self._sender_key)',
        'is_known = mechanism == b"CURVE"',
        _CURVE,
    ),
    Mutant(
        "sends-in-the-clear",
        "A node with certificates opens links that are not encrypted to who offers no key.",
        "connector/zmq_sender.py",
        "if bool(endpoint.curve_key) is not self._is_encrypted:",
        "if endpoint.curve_key and not self._is_encrypted:",
        _CURVE,
    ),
    Mutant(
        "asks-for-no-certificate",
        "gRPC's servers show a certificate and ask for none.",
        "runtime/credentials.py",
        "require_client_authentication=True",
        "require_client_authentication=False",
        _CREDENTIALS,
    ),
    Mutant(
        "members-through-the-proxy",
        "A host's http_proxy gets what members say to each other, which it knows nothing of: a cluster there never becomes ready.",
        "runtime/credentials.py",
        '(("grpc.enable_http_proxy", 0),)',
        '(("grpc.enable_http_proxy", 1),)',
        _RENEWED,
    ),
    Mutant(
        "too-early-is-never",
        "A renewed certificate that this host's clock finds too early is not looked at again: the old one ends.",
        "runtime/credentials.py",
        "if mark == self._mark and not self._fault:",
        "if mark == self._mark:",
        _RENEWED,
    ),
    Mutant(
        "the-first-authority-counts",
        "Of two authorities in ca.crt the first must be in its time, whoever has signed.",
        "runtime/certificates.py",
        '("ca.crt", (in_time or signers)[0])',
        '("ca.crt", authorities[0])',
        _RENEWED,
    ),
    Mutant(
        "ended-certificates-pass",
        "A process starts with a certificate that has ended, and is refused by everybody.",
        "runtime/certificates.py",
        "if now > each.not_valid_after_utc:",
        "if now < each.not_valid_before_utc:",
        _CREDENTIALS,
    ),
    Mutant(
        "heads-without-a-bound",
        "A head that comes in one piece may be as large as the piece.",
        "runtime/http_protocol.py",
        "if num_bytes > self._bounds.max_head_bytes:",
        "if num_bytes > 1 << 30:",
        _HTTP,
    ),
    Mutant(
        "headers-without-an-end",
        "A header that does not end is kept as long as it comes.",
        "runtime/http_protocol.py",
        "self._untold_bytes > self._bounds.max_head_bytes",
        "self._untold_bytes > 1 << 30",
        _HTTP,
    ),
    Mutant(
        "pipelines-without-an-end",
        "Requests sent ahead of an answer are kept, however many.",
        "runtime/http_protocol.py",
        "if len(self.pipeline) >= MAX_PIPELINED:",
        "if len(self.pipeline) >= 1 << 30:",
        _HTTP,
    ),
    Mutant(
        "leavers-behind-a-pipeline",
        "A client that leaves with a request sent ahead of its answer is noticed when the answer is out.",
        "runtime/http_protocol.py",
        "self._is_lost = True\n        self._let_go_of_running()",
        "self._is_lost = True",
        ("tests/security/test_http_leaving.py",),
    ),
    Mutant(
        "batches-without-a-bound",
        "Every branch of a batch is answered with a Cancel, however many millions there are.",
        "router/core.py",
        "> MAX_BRANCHES:",
        "> MAX_BRANCHES << 10:",
        ("tests/router/test_core.py",),
    ),
    Mutant(
        "strangers-uncounted",
        "Who never calls is forgotten without being counted.",
        "runtime/unheard.py",
        "            self._waiting.popleft()\n            num_refused += 1\n        return num_refused\n\n    def next_deadline",
        "            self._waiting.popleft()\n        return num_refused\n\n    def next_deadline",
        _UNHEARD,
    ),
    Mutant(
        "each-call-a-connection",
        "A second call over one connection passes for another connection's, and a stranger for a member.",
        "runtime/unheard.py",
        "if address not in self._callers and self._waiting:",
        "if self._waiting:",
        _UNHEARD,
    ),
    Mutant(
        "handshakes-without-an-end",
        "Connections that never call are remembered, however many.",
        "runtime/unheard.py",
        "if len(self._waiting) > self._max_waiting:",
        "if len(self._waiting) > 1 << 30:",
        _UNHEARD,
    ),
    Mutant(
        "callers-by-age",
        "Over the bound who called first is forgotten, though it calls all the time.",
        "runtime/unheard.py",
        "self._callers.move_to_end(address)",
        "self._callers.move_to_end(address, len(self._callers) > 1 << 30)",
        _UNHEARD,
    ),
    Mutant(
        "streamers-unheard",
        "Who calls for a stream of answers is not noted.",
        "runtime/grpc_server.py",
        "self._called(context.peer())\n                async with",
        "async with",
        ("tests/security/test_refused_grpc.py",),
    ),
)

"""Which Redis URLs are taken, what is said of the others, and that no secret is ever shown."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from runtime.redis_address import registry_problem, shown
from tests.security.strangers import make_certificates

SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        "embedded",
        "redis://127.0.0.1:6379/0",
        "redis://registry.example",
        f"redis://user:{SECRET}@[::1]:6379/15",
        f"rediss://:{SECRET}@host:6380/0?ssl_check_hostname=false&ssl_cert_reqs=none",
        f"redis://:{SECRET}%40%23%2f@host/3",
        "unix:///run/redis/redis.sock?db=2",
    ],
)
def test_taken(url: str) -> None:
    assert registry_problem(url, None) is None
    assert SECRET not in shown(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "must be embedded, redis://"),
        ("127.0.0.1:6379", "must be embedded, redis://"),
        (f"http://:{SECRET}@host", "must be embedded, redis://"),
        (f"redis://:{SECRET}@", "must be embedded, redis://"),
        (f"redis://:{SECRET}@host:port/0", "must be embedded, redis://"),
        (f"redis://:{SECRET}@host:70000/0", "must be embedded, redis://"),
        (f"redis://:{SECRET}@host:0/0", "must be embedded, redis://"),
        (f"redis://:{SECRET}@[::1/0", "must be embedded, redis://"),
        (f"redis://:{SECRET}@host/zero", "the number of a database"),
        (f"redis://:{SECRET}#x@host/0", "must be embedded, redis://"),
        (f"redis://host/0#{SECRET}", "write %23"),
        (f"redis://:a#{SECRET}@host/0", "must be embedded, redis://"),
        (f"redis://:a?{SECRET}@host/0", "must be embedded, redis://"),
        (f"redis://:1/{SECRET}@host/0", "must be embedded, redis://"),
        (f"redis://user:1?{SECRET}@host/0", "it takes no options"),
        (f"redis://user:1/{SECRET}@host/0", "the number of a database"),
        (f"redis://host?password={SECRET}", "it takes no options"),
        (f"rediss://:{SECRET}@host?socket_timeout=0", "its options must be of ssl_ca_certs"),
        (f"rediss://:{SECRET}@host?ssl_cert_reqs=banana", "ssl_cert_reqs must be none, optional or required"),
        (f"rediss://:{SECRET}@host?ssl_check_hostname=", "ssl_check_hostname must be true or false"),
        (f"rediss://:{SECRET}@host?ssl_cert_reqs=none&ssl_cert_reqs=required", "ssl_cert_reqs must be given once"),
        (f"rediss://:{SECRET}@host?ssl_keyfile={__file__}", "ssl_keyfile must come with ssl_certfile"),
        (f"rediss://:{SECRET}@host?ssl_ca_certs=/no/ca.pem", "ssl_ca_certs must name a file, and '/no/ca.pem' is none"),
        (f"rediss://:{SECRET}@host?ssl_certfile=", "ssl_certfile must name a file, and '' is none"),
        ("unix://run/redis.sock", "must name a socket"),
        ("unix:///run/redis.sock?db=x", "the option db must be a number"),
    ],
)
def test_refused_with_a_sentence_without_the_secret(url: str, says: str) -> None:
    problem = registry_problem(url, None)
    assert problem is not None and problem.startswith("--registry ")
    assert says in problem
    assert SECRET not in problem


def test_files_of_certificates_are_looked_into_before_anything_starts(tmp_path: Path) -> None:
    ours, others = (make_certificates(tmp_path / name) for name in ("ours", "others"))
    locked = tmp_path / "locked.key"
    key = serialization.load_pem_private_key((ours / "tls.key").read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(SECRET.encode()),
        )
    )

    def said(**options: Path | str) -> str | None:
        return registry_problem(
            f"rediss://:{SECRET}@host?{urlencode({f'ssl_{k}': v for k, v in options.items()})}", None
        )

    assert said(ca_certs=ours / "ca.crt", certfile=ours / "tls.crt", keyfile=ours / "tls.key") is None
    for options, sentence in (
        ({"ca_certs": ours / "tls.key"}, "the file of its option ssl_ca_certs holds no certificate, as PEM"),
        ({"ca_certs": __file__}, "the file of its option ssl_ca_certs holds no certificate, as PEM"),
        ({"certfile": ours / "tls.crt"}, "ssl_certfile must name a certificate and its key, as PEM"),
        ({"certfile": ours / "tls.crt", "keyfile": others / "tls.key"}, "ssl_certfile and ssl_keyfile must name"),
        ({"certfile": ours / "tls.crt", "keyfile": locked}, "as PEM that is not encrypted"),
    ):
        problem = said(**options)
        assert problem is not None and sentence in problem and SECRET not in problem, problem


def test_a_namespace_is_a_short_word_and_means_something_in_redis_only() -> None:
    assert registry_problem("redis://host", "green-2") is None
    for namespace in ("", "a b", "{a}", "a" * 65):
        assert "--registry-namespace" in (registry_problem("redis://host", namespace) or "")
    assert "embedded" in (registry_problem("embedded", "green") or "")


@given(st.text(max_size=40), st.sampled_from(["redis://", "unix://", "", "redis://h@", "embedded"]))
def test_any_text_is_taken_or_refused_in_one_line(text: str, start: str) -> None:
    problem = registry_problem(start + text, None)
    assert problem is None or problem.startswith("--registry ")


@given(st.text(st.characters(exclude_characters="@/?#[]:\\", exclude_categories=["Cc", "Cs", "Z"]), min_size=1))
def test_no_password_is_shown(password: str) -> None:
    marked = f"<{password}>"
    assert marked not in shown(f"redis://user:{marked}@host:1/0")
    assert marked not in (registry_problem(f"redis://user:{marked}@host:1/zero", None) or "")

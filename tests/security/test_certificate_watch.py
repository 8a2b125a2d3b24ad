"""Certificates that end: a line and a gauge say so in time, of whichever of certificate and authority ends first."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from runtime import certificate_watch
from runtime.certificate_watch import DAY_S, CertificateEnd, warn_of_end, watch_certificates
from runtime.certificates import make_authority, sign_host
from runtime.credentials import NO_CREDENTIALS, Credentials
from tests.security.strangers import sign_anew


def directory(folder: Path, authority_days: int, days: int) -> Path:
    folder.mkdir()
    authority = make_authority(authority_days)
    pair = sign_host(authority, ["localhost"], days)
    for name, content in (("ca.crt", authority.certificate), ("tls.crt", pair.certificate), ("tls.key", pair.key)):
        (folder / name).write_bytes(content)
    return folder


def days_left(credentials: Credentials) -> float:
    ends_at = credentials.ends_at()
    assert ends_at is not None
    return (ends_at - time.time()) / DAY_S


@pytest.mark.covers("X03")
@pytest.mark.parametrize(("authority_days", "days", "first"), [(100, 7, 7), (5, 90, 5)])
def test_the_end_is_that_of_certificate_or_authority_whichever_is_first(
    tmp_path: Path, authority_days: int, days: int, first: int
) -> None:
    assert abs(days_left(Credentials(directory(tmp_path / "mine", authority_days, days))) - first) < 0.1
    assert NO_CREDENTIALS.ends_at() is None


@pytest.mark.covers("X03")
def test_where_one_authority_follows_another_that_which_has_not_signed_says_nothing(tmp_path: Path) -> None:
    mine = directory(tmp_path / "mine", 100, 50)
    with (mine / "ca.crt").open("ab") as file:
        file.write(make_authority(3).certificate)
    assert abs(days_left(Credentials(mine)) - 50) < 0.1


@pytest.mark.covers("X03")
def test_the_gauge_says_when_and_follows_a_renewal(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = shutil.copytree(ours, tmp_path / "mine")
    sign_anew(mine, ours.parent, -timedelta(1), timedelta(2))
    credentials, registry = Credentials(mine), CollectorRegistry()
    registry.register(CertificateEnd("node", credentials.ends_at))

    def shown() -> float:
        found = re.search(
            r"^baton_node_certificate_ends_seconds (\S+)$", generate_latest(registry).decode(), re.MULTILINE
        )
        assert found is not None
        return (float(found[1]) - time.time()) / DAY_S

    assert abs(shown() - 2) < 0.1
    sign_anew(mine, ours.parent, -timedelta(1), timedelta(9))
    monkeypatch.setattr(time, "monotonic", lambda: float("inf"))  # it is looked for once a second
    assert abs(shown() - 9) < 0.1
    without = CollectorRegistry()
    without.register(CertificateEnd("node", NO_CREDENTIALS.ends_at))
    assert not generate_latest(without)


@pytest.mark.covers("X03")
def test_a_month_before_a_line_says_so_and_not_earlier(caplog: pytest.LogCaptureFixture) -> None:
    now = 1_800_000_000.0
    for ends_at in (None, now + 30.1 * DAY_S):
        warn_of_end(ends_at, now)
    assert not caplog.text
    warn_of_end(now + 29.9 * DAY_S, now)
    warn_of_end(now - 1.5 * DAY_S, now)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "certificate_ends at=2027-02-14T05:36Z days_left=29.9" in caplog.text and "days_left=-1.5" in caplog.text


@pytest.mark.covers("X03")
def test_it_is_said_at_the_start_and_again_each_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_watch, "DAY_S", 0.01)
    credentials = Credentials(directory(tmp_path / "soon", 100, 7))

    async def run() -> None:
        async with AsyncExitStack() as started:
            watch_certificates(credentials, started)
            async with asyncio.timeout(60):
                while caplog.text.count("certificate_ends") < 3:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.005)

    asyncio.run(run())

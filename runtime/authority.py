"""Whom a command that asks over HTTPS believes: one authority of the user's, or those that this host trusts.

Nothing but the standard library: health checks start it every five seconds. Not here: what members show (credentials.py).
"""

from __future__ import annotations

import ssl
from pathlib import Path


def believing(authority: Path | None) -> ssl.SSLContext:
    """For a client. None: the host's own, or what SSL_CERT_FILE and SSL_CERT_DIR name, as for curl.

    An authority in the file need not be a root: where a company's own signs the cluster's, members (gRPC) take it, too.
    Raises OSError, of which ssl.SSLError is a kind.
    """
    context = ssl.create_default_context(cafile=None if authority is None else str(authority))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context

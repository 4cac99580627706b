"""A certificate authority and a server's certificate, made for one test run."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """Files in PEM form: the authority's certificate, the server's certificate and its key."""

    authority: Path
    cert: Path
    key: Path

    def client_context(self) -> ssl.SSLContext:
        """What a client needs that trusts this authority and no other."""
        return ssl.create_default_context(cafile=str(self.authority))


def make_certificates(folder: Path) -> Certificates:
    """Write a new authority and a certificate for localhost and 127.0.0.1 into a folder."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    files = Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    authority.cert_pem.write_to_path(str(files.authority))
    issued.private_key_pem.write_to_path(str(files.key))
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(str(files.cert), append=number > 0)
    return files

"""gRPC credentials made of certificates: of servers, which follow changed files, and of channels.

The name that a channel verifies is one that all services' certificates carry, `triptych.internal` by default,
and not the dialled address. Workers are dialled by the addresses of their registrations, which are those of
pods: new ones at every start, which no certificate can name beforehand. The certificate says that a process
belongs to the cluster; which worker is where, its signed registration says (`rpc.internal_token`).
"""

from __future__ import annotations

import grpc

from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.material import TlsMaterial


def server_credentials(certificates: Certificates, *, mutual: bool) -> grpc.ServerCredentials:
    """Credentials of a server; with `mutual` it refuses clients without a certificate of the CA."""
    used = certificates.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at every handshake, in a thread of its own; None: nothing has changed."""
        nonlocal used
        if (found := certificates.current()) is used:
            return None
        used = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        fetch,  # type: ignore[arg-type]  # None is allowed, as its documentation says
        require_client_authentication=mutual,
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca or None)


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Credentials of a channel to another service."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def channel_options(material: TlsMaterial) -> list[tuple[str, str]]:
    """Options of such a channel: the name that the server's certificate must carry."""
    return [("grpc.ssl_target_name_override", material.name)]

"""The OpenSSL commands of the security page make files that services take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support.certificates import NAME
from triptych.base.config import TlsFiles
from triptych.base.rpc.tls.material import read_material

PAGE = Path(__file__).parents[3] / "docs" / "security.md"


@pytest.mark.slow
def test_the_commands_for_openssl_make_certificates_that_services_take(tmp_path: Path) -> None:
    found = re.search(r"<!-- openssl: begin -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    subprocess.run(["bash", "-ec", found[1]], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    files = TlsFiles(*(str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem")), NAME)
    assert read_material(files).cert == (tmp_path / "cert.pem").read_bytes()
